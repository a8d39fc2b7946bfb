"""talk.py -- talks with a trained model by its chat template, in a terminal.

talk.py DIR [--system TEXT] [--tokens N] [--temperature X] [--top-k K] [--top-p X] [--seed N]

Each line of stdin is a turn of the user, and the answer is printed as it is drawn, up to the end of
the turn or N tokens. The program runs once for each answer. It reads the last tokens of the talk,
as many as a sample has.

Exit codes: 0 the input has ended; 2 an argument or a file is wrong; otherwise the program's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import sample
import trained
from chat import PROBE, WORD, Template
from checkpoint import Bad, code_of
from encoding import Encoder, Recipe
from trained import say

PROMPT = "> "


def chat_template(recipe: Recipe) -> Template:
    source = recipe.templates.get("default")
    if source is None:
        raise Bad(
            "the tokenizer has no chat template (tokenizer_config.json, chat_template.jinja);"
            " ./run sample continues a text"
        )
    return Template(source.text, recipe.variables, recipe.now, source.where)


def stops(encoder: Encoder, template: Template) -> set[int]:
    """Return the tokens that end an answer: the end of a text, and the token that the template
    writes after a turn of the assistant."""
    found = {encoder.recipe.end} - {None}
    text, spans = template.conversation(PROBE, None)
    start, end = spans[-1]
    behind = encoder.ids(text[start:end].rpartition(WORD)[2])[:1]
    assert encoder.tokenizer
    added = encoder.tokenizer.get_added_tokens_decoder()
    return {
        x for x in (*found, *behind) if x is not None and (x in found or x in added)
    }


def talk(chosen: argparse.Namespace) -> int:
    recipe = trained.recipe(chosen)
    template, encoder = chat_template(recipe), Encoder(recipe)
    ends = stops(encoder, template)
    messages = [{"role": "system", "content": chosen.system}] if chosen.system else []
    if sys.stdin.isatty():
        say("Type a line to the model; Ctrl-D ends the talk.")
    while True:
        if sys.stdin.isatty():
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        ids = encoder.ids(template.render(messages, None, prompt=True))
        code, answer = sample.answered(chosen, encoder, ids, ends)
        if code:
            return code
        messages.append({"role": "assistant", "content": answer})


def main(words: Sequence[str]) -> int:
    told = (__doc__ or "").partition("[--seed N]\n\n")[2]
    parser = trained.parser("run chat", told)
    parser.add_argument(
        "--system", metavar="TEXT", help="a message of the system before the talk"
    )
    sample.options(parser)
    return code_of("run chat", talk, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
