"""chat.py -- renders conversations by a tokenizer's template, and finds the assistant's text in
them.

A template is Jinja's, set up as in Hugging Face's transformers. It is not trusted and runs in
Jinja2's ImmutableSandboxedEnvironment. Spans are of characters: [start, end).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from checkpoint import Bad
from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks around the content of {% generation %}: no Unicode text contains them.
BEGIN, END = "\ufdd0", "\ufdd1"
REASONED = "</think>"  # templates drop the text before it from earlier turns

# Keys of a message that choose whether it is learned, with the value for yes: OpenAI's weight,
# Axolotl's train and training, ms-swift's and XTuner's loss, torchtune's masked.
FLAGS = {
    "weight": True,
    "train": True,
    "training": True,
    "loss": True,
    "masked": False,
}
DETAILS = ("train_detail", "training_detail")  # Axolotl's: parts of a message
# Fields of a message besides its content, each with its alternative names.
REASONING = ("reasoning_content", "thinking", "reasoning")
SAID = (
    ("tool_calls",),
    ("function_call",),
    ("refusal",),
    ("audio",),
    REASONING,
)
# Roles in ShareGPT's records.
FROM = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
# Keys of a record that are read besides its messages.
GIVEN = ("tools", "chat_template_kwargs")
# Keys that would change which text is learned, each with a hint.
REFUSED = {
    "system": 'make it the first of the messages, {"role": "system", ...}',
    "functions": "`tools` is its name now",
    "images": "only text is learned",
    "videos": "only text is learned",
    "audios": "only text is learned",
    "assistant_masks": "a template with {% generation %} chooses what is learned",
    "completion_mask": "`prompt` and `completion` choose what is learned",
}
# Alpaca's records: a question, which `input` may continue, and its answer; without a chat template
# they are written as Stanford's Alpaca was trained.
ALPACA = ("instruction", "output")
ASKS = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{}\n\n{}### Response:\n"
)
WITH_INPUT = ", paired with an input that provides further context"
BESIDE = (*GIVEN, *REFUSED, "weight", "label", "input", "history")
TAKEN = ("messages", "tools", "add_generation_prompt")

# Two turns each, and the word that ends the last one.
WORD = "yes"
PROBE = [{"role": role, "content": WORD} for role in ("user", "assistant") * 2]

Message = Mapping[str, Any]
Given = Mapping[str, Any]  # variables of a template besides messages
Span = tuple[int, int]


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}"""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), True)
        call = self.call_method("marked")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + END


def tojson(
    x: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's HTML escapes."""
    return json.dumps(
        x,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def spans_of(marked: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and the spans between them."""
    text, spans = "", []
    for number, part in enumerate(marked.split(BEGIN)):
        inside, _, outside = part.partition(END)
        if not number:
            text = part
            continue
        spans.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, spans


class Template:
    """A chat template. variables: bos_token and the like; now: result of strftime_now; where: its
    file and key."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        now: datetime,
        where: str = "chat template",
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": now.strftime,
        }
        self.variables = variables
        self.source, self.where = source, where
        # Python's compiler refuses blocks that are too deep
        try:
            self.template = environment.from_string(source)
            tree = environment.parse(source)
        except TemplateSyntaxError as e:
            raise Bad(f"{where}:{e.lineno}: {e.message}") from None
        except Exception as e:
            raise Bad(f"{where}: invalid template: {e}") from None
        calls = tree.find_all(nodes.ExtensionAttribute)
        self.marks = any(call.name == "marked" for call in calls)

    def render(
        self,
        messages: Sequence[Message],
        given: Given | None,
        prompt: bool = False,
    ) -> str:
        """Return the text of messages. Raises Bad if the template fails."""
        values = {"tools": None, "documents": None, **self.variables}
        values |= given or {}
        try:
            text = self.template.render(
                **values, messages=messages, add_generation_prompt=prompt
            )
            text.encode()
        except UnicodeEncodeError:
            raise Bad("half a UTF-16 surrogate pair is not text") from None
        except Exception as e:  # a template may raise anything
            raise Bad(f"the chat template fails: {e}") from None
        return text

    def conversation(
        self, messages: Sequence[Message], given: Given | None
    ) -> tuple[str, list[Span]]:
        """Return the text and the assistant's spans: those of {% generation %}, or each turn after
        its prompt. A message that is not to be learned has none."""
        whole = self.render(messages, given)
        said = [n for n, x in enumerate(messages) if x["role"] == "assistant"]
        learned = [asked(messages, n) is not False for n in said]
        if self.marks:
            whole, spans = spans_of(whole)
            if not all(learned):
                self.paired(whole, spans, [messages[n] for n in said])
                spans = [span for span, x in zip(spans, learned, strict=True) if x]
            return whole, spans
        spans = [
            self.turn(whole, messages, n, given)
            for n, x in zip(said, learned, strict=True)
            if x
        ]
        return whole, spans

    def paired(self, text: str, spans: Sequence[Span], said: Sequence[Message]) -> None:
        """Require one {% generation %} per message of the assistant."""
        if len(spans) == len(said):
            pairs = zip(spans, said, strict=True)
            if all(words(x) in text[a:b] for (a, b), x in pairs):
                return
        raise Bad(
            f"{', '.join(FLAGS)}: {self.where} does not have one {{% generation %}} block for each"
            " message of the assistant, so none can be excluded"
        )

    def answer(
        self,
        asks: Sequence[Message],
        answers: Sequence[Message],
        given: Given | None,
    ) -> tuple[str, list[Span]]:
        """Return the text and one span: everything after the prompt is the answer."""
        prompt, _ = spans_of(self.render(asks, given, prompt=True))
        whole, _ = spans_of(self.render([*asks, *answers], given))
        if not whole.startswith(prompt):
            raise Bad(
                "the chat template renders the prompt differently when a completion follows"
            )
        return whole, [(len(prompt), len(whole))]

    def reads(self, messages: Sequence[Message], text: str) -> None:
        """Require that the template reads every field of a message, and prints none as a Python
        object."""
        for number, message in enumerate(messages, 1):
            for names in SAID:
                if any(message.get(x) for x in names) and not any(
                    x in self.source for x in names
                ):
                    raise Bad(
                        f"message {number}: {', '.join(names)}: {self.where} does not read it;"
                        " remove it, or use a template that does"
                    )
            content = message.get("content")
            if isinstance(content, (list, dict)) and str(content) in text:
                kind = "a list" if isinstance(content, list) else "an object"
                raise Bad(
                    f"message {number}: content: {self.where} expects text, but this is {kind}"
                )

    def ends(self) -> bool | None:
        """Return whether the template writes something after an answer that is learned. None if it
        cannot render the conversations that show it."""
        for messages in (PROBE, PROBE[:2]):
            try:
                text, spans = self.conversation(messages, None)
            except Bad:
                continue
            start, end = spans[-1] if spans else (0, 0)
            return bool(text[start:end].rpartition(WORD)[2].strip())
        return None

    def turn(
        self,
        whole: str,
        messages: Sequence[Message],
        number: int,
        given: Given | None,
    ) -> Span:
        """Return the span of a turn. Some templates render a turn differently when it is the last
        one: they add reasoning. So the turn is the longest end of that rendering with which the
        whole text continues."""
        before = self.render(messages[:number], given, prompt=True)
        said = self.render(messages[: number + 1], given)
        start = len(before)
        known = words(messages[number])
        if whole.startswith(before) and said.startswith(before):
            for at in range(start, len(said)):
                own = said[at:]
                if whole.startswith(own, start) and known in own:
                    return start, start + len(own)
        raise Bad(
            f"message {number + 1}: the chat template renders it, or a message before it, "
            f"differently"
            " when more follows; use a template with {% generation %}"
        )


# ---- records


def words(message: Message) -> str:
    """Return the text of a message after its reasoning."""
    said = str(message.get("content") or "")
    return said.rpartition(REASONED)[2].strip()


def asked(messages: Sequence[Message], number: int) -> bool | None:
    """Return whether a message is to be learned, by its own keys; None if it has none of them."""
    message, found = messages[number], None
    where = f"message {number + 1}"
    for key in DETAILS:
        if message.get(key):
            raise Bad(
                f"{where}: {key}: a message is trained on as a whole or not at all (weight, train)"
            )
    for key, value in FLAGS.items():
        x = message.get(key)
        if x is None:
            continue
        if not isinstance(x, (int, float)) or x not in (0, 1):
            raise Bad(f"{where}: {key} is {x}; allowed: 0 or 1, false or true")
        learned = bool(x) == value
        if learned and message["role"] != "assistant":
            raise Bad(f"{where}: {key}: only messages of the assistant are trained on")
        if found is not None and found != learned:
            raise Bad(f"{where}: {key} contradicts the keys before it")
        found = learned
    return found


def plain(message: Any) -> Message:
    """Return a message, converted from ShareGPT's `from` and `value` if needed. Keys that are None
    are dropped, because a column may have them for other rows."""
    if isinstance(message, dict):
        found = {key: x for key, x in message.items() if x is not None}
        if "role" not in found and "from" in found:
            role = FROM.get(str(found.pop("from")))
            if role is None:
                known = ", ".join(FROM)
                raise Bad(f"from: {message['from']}; allowed: {known}")
            if not isinstance(found.get("value"), str):
                raise Bad("value: must be the text of a message")
            found = {"role": role, "content": found.pop("value"), **found}
        if isinstance(found.get("role"), str):
            return reasoned(found)
    raise Bad('a message is not {"role": ..., "content": ...}')


def reasoned(message: Message) -> Message:
    """Return a message with its reasoning under both names that transformers gives to templates."""
    said = [message[key] for key in REASONING if key in message]
    if not said:
        return message
    return {"thinking": said[0], **message, "reasoning_content": said[0]}


def checked(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise Bad("not a list of messages")
    found = [plain(message) for message in messages]
    for number in range(len(found)):
        asked(found, number)
    return found


def side(role: str, x: Any) -> list[Message]:
    """Return the messages of a prompt or completion, given as text or messages. A key that
    contradicts the role is refused."""
    found = checked([{"role": role, "content": x}] if isinstance(x, str) else x)
    learns = role == "assistant"
    for number in range(len(found)):
        if asked(found, number) is not (not learns):
            continue
        raise Bad(
            f"message {number + 1}: a completion is trained on and a prompt is not; in "
            f"`messages` use"
            f" {', '.join(FLAGS)}"
        )
    return found


def given(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables besides messages: tools, as objects or their JSON, and TRL's
    chat_template_kwargs."""
    tools, more = (record.get(key) for key in GIVEN)
    if isinstance(tools, str) and not tools.strip():
        tools = None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Bad("tools: not JSON") from None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(x, dict) for x in tools)
    ):
        raise Bad("tools: must be a list of objects")
    if more is None:
        more = {}
    if not isinstance(more, dict) or more.keys() & {*TAKEN}:
        raise Bad(f"chat_template_kwargs: must be an object without {', '.join(TAKEN)}")
    return {**more, "tools": tools}


def beside(record: Mapping[str, Any]) -> None:
    """Refuse keys of a record that would change which text is learned."""
    for key, what in REFUSED.items():
        if record.get(key):
            raise Bad(f"{key} is not supported: {what}")
    weight, label = record.get("weight"), record.get("label")
    # a number as label is a column of classes, KTO's is a boolean
    for key, refused in (("weight", weight == 0), ("label", label is False)):
        if refused:
            raise Bad(
                f"{key} is {record[key]}: such a record is not trained on: remove it"
            )
    if weight not in (None, 1):
        raise Bad(
            f"weight is {weight}: a record is trained on as a whole or not at all"
        )


def alpaca(record: Mapping[str, Any], template: Template | None) -> list[str]:
    """Return the prompt and the completion of an Alpaca record."""
    asks, more, answer = (
        record.get(key) or "" for key in ("instruction", "input", "output")
    )
    for key, x in zip(
        ("instruction", "input", "output"), (asks, more, answer), strict=True
    ):
        if not isinstance(x, str):
            raise Bad(f"{key}: must be a text")
    if record.get("history"):
        raise Bad(
            "history is not supported: make its turns and this one a list `messages`"
        )
    if template:
        return [f"{asks}\n{more}" if more else asks, answer]
    known = f"### Input:\n{more}\n\n" if more else ""
    return [ASKS.format(WITH_INPUT if more else "", asks, known), answer]


def chat(
    template: Template, messages: list[Message], more: Given
) -> tuple[str, list[Span]]:
    """Return the text and spans of a conversation, which must have an answer."""
    roles = list(dict.fromkeys(message["role"] for message in messages))
    if "assistant" not in roles:
        raise Bad(
            "no message of the assistant, so nothing to train on; the roles are: "
            + ", ".join(roles)
        )
    return template.conversation(messages, more)


def rendered(
    templates: Mapping[str, Template],
    record: Mapping[str, Any],
    fields: Sequence[str],
) -> tuple[str, list[Span]]:
    """Return the text of a record, and the spans to learn. A record with tools uses the template
    `tool_use` if there is one, as in transformers."""
    try:
        told = json.dumps(record, ensure_ascii=False, default=str)
    except RecursionError:
        raise Bad("JSON is nested too deeply") from None
    if BEGIN in told or END in told:
        raise Bad("U+FDD0 and U+FDD1 are not characters")
    beside(record)
    more = given(record)
    name = "default" if more["tools"] is None else "tool_use"
    template = templates.get(name, templates.get("default"))
    values = [record[field] for field in fields]
    if tuple(fields) == ALPACA:
        values = alpaca(record, template)
    if template and len(values) == 1:
        messages = checked(values[0])
        text, spans = chat(template, messages, more)
        template.reads(messages, text)
    elif template:
        asks, answers = map(side, ("user", "assistant"), values)
        text, spans = template.answer(asks, answers, more)
        template.reads([*asks, *answers], text)
    elif len(values) == 2 and all(isinstance(x, str) for x in values):
        text = "".join(values)
        spans = [(len(values[0]), len(text))]
    else:
        raise Bad(
            "the tokenizer has no chat template; it is looked for in tokenizer_config.json and"
            " chat_template.jinja beside tokenizer.json (chat_template.json, a processor's, is not"
            " read)"
        )
    if not any(start < end for start, end in spans):
        raise Bad("there is nothing to train on: the assistant's messages are empty")
    return text, spans
