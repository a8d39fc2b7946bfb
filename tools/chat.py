"""chat.py -- conversations as a tokenizer's template renders them, and what of them the assistant
says.

A template is Jinja's, set up as Hugging Face's transformers do; it comes from a stranger and runs
in Jinja2's ImmutableSandboxedEnvironment. Spans are of characters: [start, end).
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

# Around what {% generation %} holds: Unicode keeps them out of any text.
BEGIN, END = "\ufdd0", "\ufdd1"
REASONED = "</think>"  # templates leave out of earlier turns what is before it

Message = Mapping[str, Any]
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
    """Without Jinja's escapes of HTML"""
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
    """The text without marks, and what is between them"""
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
    """variables: bos_token and the like; now: what strftime_now tells"""

    def __init__(
        self, source: str, variables: Mapping[str, str], now: datetime
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
        try:
            self.template = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise Bad(f"chat template:{e.lineno}: {e.message}") from None
        tree = environment.parse(source)
        calls = tree.find_all(nodes.ExtensionAttribute)
        self.marks = any(call.name == "marked" for call in calls)

    def render(
        self, messages: Sequence[Message], tools: Any, prompt: bool = False
    ) -> str:
        try:
            return self.template.render(
                **self.variables,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
            )
        except Exception as e:  # whatever a template does
            raise Bad(f"the chat template fails: {e}") from None

    def conversation(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[str, list[Span]]:
        """Its text, and the assistant's spans: those of {% generation %}, or each turn behind
        what would ask for it."""
        whole = self.render(messages, tools)
        if self.marks:
            return spans_of(whole)
        spans = [
            self.turn(whole, messages, number, tools)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return whole, spans

    def answer(
        self, asks: Sequence[Message], answers: Sequence[Message], tools: Any
    ) -> tuple[str, list[Span]]:
        """All behind the prompt is the answer."""
        asked, _ = spans_of(self.render(asks, tools, prompt=True))
        whole, _ = spans_of(self.render([*asks, *answers], tools))
        if not whole.startswith(asked):
            raise Bad(
                "the chat template renders the prompt otherwise when a completion follows"
            )
        return whole, [(len(asked), len(whole))]

    def turn(
        self,
        whole: str,
        messages: Sequence[Message],
        number: int,
        tools: Any,
    ) -> Span:
        """A turn that is rendered otherwise where it is the last (some templates add reasoning
        there) is the longest end of that with which the whole goes on."""
        asked = self.render(messages[:number], tools, prompt=True)
        said = self.render(messages[: number + 1], tools)
        if whole.startswith(asked) and said.startswith(asked):
            rest, own = whole[len(asked) :], said[len(asked) :]
            words = str(messages[number].get("content") or "")
            words = words.rpartition(REASONED)[2].strip()
            for at in range(len(own)):
                if rest.startswith(own[at:]) and words in own[at:]:
                    return len(asked), len(whole) - len(rest) + len(own) - at
        raise Bad(
            f"message {number + 1}: the chat template renders it, or what is before it, otherwise"
            " when more follows; a template with {% generation %} is needed"
        )


# ---- records


def checked(messages: Any) -> list[Message]:
    """A column's keys that a message has not are None."""
    if not isinstance(messages, list) or not messages:
        raise Bad("no list of messages")
    for message in messages:
        known = isinstance(message, dict)
        if not known or not isinstance(message.get("role"), str):
            raise Bad('a message is no {"role": ..., "content": ...}')
    return [
        {key: x for key, x in message.items() if x is not None}
        for message in messages
    ]


def side(role: str, x: Any) -> list[Message]:
    """Of prompt and completion: a text, or messages"""
    return checked([{"role": role, "content": x}] if isinstance(x, str) else x)


def rendered(
    template: Template | None, record: Mapping[str, Any], fields: Sequence[str]
) -> tuple[str, list[Span]]:
    """Its text, and what of it is to be learned"""
    tools = record.get("tools")
    told = json.dumps(record, ensure_ascii=False, default=str)
    if BEGIN in told or END in told:
        raise Bad("U+FDD0 and U+FDD1 are no characters of a text")
    values = [record[field] for field in fields]
    if template and len(values) == 1:
        messages = checked(values[0])
        if not any(message["role"] == "assistant" for message in messages):
            raise Bad("no message of the assistant: nothing to learn")
        text, spans = template.conversation(messages, tools)
    elif template:
        asks, answers = map(side, ("user", "assistant"), values)
        text, spans = template.answer(asks, answers, tools)
    elif len(values) == 2 and all(isinstance(x, str) for x in values):
        text = "".join(values)
        spans = [(len(values[0]), len(text))]
    else:
        raise Bad(
            "the tokenizer has no chat template: one is in tokenizer_config.json or"
            " chat_template.jinja beside tokenizer.json"
        )
    if not any(start < end for start, end in spans):
        raise Bad("there is nothing to learn: the assistant says nothing")
    return text, spans
