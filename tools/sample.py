"""sample.py -- continues a prompt with a trained model, by tokens through the program and back.

sample.py DIR --prompt TEXT [--tokens N] [--temperature X] [--top-k K] [--top-p X] [--seed N]

DIR has the weights, and the tokenizer (tokenizer.json) unless --tokenizer names another; the
program must have been made for the model. Text is printed as it is drawn, up to the token that ends
a text, or N tokens.

Exit codes: 0; 2 an argument or a file is wrong; otherwise the program's.
"""

from __future__ import annotations

import argparse
import codecs
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import trained
from checkpoint import Bad, code_of, tell
from encoding import Encoder, Ids
from zg.output import naming

ANEW = 16  # tokens that are decoded again with the next one: a letter may span several
CUT = "\N{REPLACEMENT CHARACTER}"  # result of decoding an incomplete letter


class Reader(Protocol):
    """Turns tokens into text; "" while a letter is incomplete."""

    def text(self, token: int) -> str: ...


class ByteReader:
    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def text(self, token: int) -> str:
        if token > 255:
            raise Bad(f"token {token} is not a byte; give the right --tokenizer")
        return self.decoder.decode(bytes([token]))


class TokenReader:
    """Decodes each token together with a few before it: a tokenizer may put spaces between two."""

    def __init__(self, encoder: Encoder, before: Ids) -> None:
        assert encoder.tokenizer
        self.decode = encoder.tokenizer.decode
        self.ids = before[-ANEW:]
        self.told = self.decode(self.ids)

    def text(self, token: int) -> str:
        self.ids.append(token)
        found = self.decode(self.ids)
        if found.endswith(CUT) and len(self.ids) < 2 * ANEW:
            return ""
        new = found[len(self.told) :]
        self.ids = self.ids[-ANEW:]
        self.told = self.decode(self.ids)
        return new


def command(chosen: argparse.Namespace, prompt: Path) -> list[str]:
    options = {
        "--load": chosen.load,
        "--adapter": chosen.adapter,
        "--steps": 0,
        "--prompt-tokens": prompt,
        "--sample": chosen.tokens,
        "--temperature": chosen.temperature,
        "--top-k": chosen.top_k,
        "--top-p": chosen.top_p,
        "--sample-seed": chosen.seed,
    }
    words = [str(chosen.program.absolute())]
    for name, value in options.items():
        if value is not None:
            words += [name, str(value)]
    return words


def numbers(stream: IO[str]) -> Iterator[int]:
    """Yield tokens as they come. Each is followed by a space, on a line of tokens only."""
    word = ""
    while letter := stream.read(1):
        if letter.isdigit():
            word += letter
        elif letter == " " and word:
            yield int(word)
            word = ""
        elif letter != "\n":
            stream.readline()
            word = ""


def sample(chosen: argparse.Namespace) -> int:
    recipe = trained.recipe(chosen)
    encoder = Encoder(recipe)
    try:
        chosen.prompt.encode()
    except UnicodeEncodeError:
        raise Bad("--prompt: is not UTF-8") from None
    ids = [*recipe.around[0], *encoder.ids(chosen.prompt)]
    if not ids:
        raise Bad("--prompt: must have at least one token")
    end = set() if recipe.end is None else {recipe.end}
    return answered(chosen, encoder, ids, end)[0]


def answered(
    chosen: argparse.Namespace, encoder: Encoder, ids: Ids, ends: Collection[int]
) -> tuple[int, str]:
    """Run the program on a prompt, and write the text that it draws. Return its exit code, and the
    text."""
    reader: Reader = TokenReader(encoder, ids) if encoder.tokenizer else ByteReader()
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt"
        with naming(prompt):
            prompt.write_bytes(np.array(ids, "<u4").tobytes())
        return spoken(command(chosen, prompt), reader, ends)


def spoken(
    words: Sequence[str], reader: Reader, ends: Collection[int]
) -> tuple[int, str]:
    """Run the program and write the text that it draws up to one of `ends`. Return its exit code,
    and the text."""
    text = ""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=said, text=True
        ) as running,
    ):
        assert running.stdout
        by_itself = told = False
        try:
            for token in numbers(running.stdout):
                if token in ends:
                    break
                told = True
                new = reader.text(token)
                text += new
                tell(new, end="")
            else:
                by_itself = True
        finally:
            if not by_itself:
                running.terminate()
        if told:
            tell("")
        code = running.wait()
        if not by_itself or not code:
            return 0, text
        said.seek(0)
        print(said.read(), end="", file=sys.stderr)
        return trained.code(code), text


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sampling."""
    parser.add_argument("--tokens", type=int, default=200, metavar="N")
    parser.add_argument(
        "--temperature",
        metavar="X",
        help="sampling temperature; 0: the most likely token",
    )
    parser.add_argument(
        "--top-k", metavar="K", help="sample from the K most likely tokens"
    )
    parser.add_argument(
        "--top-p",
        metavar="X",
        help="sample from the likeliest tokens whose shares add up to X",
    )
    parser.add_argument("--seed", metavar="N", help="seed of sampling")


def main(words: Sequence[str]) -> int:
    told = __doc__.partition("[--seed N]\n\n")[2]
    parser = trained.parser("run sample", told)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    options(parser)
    return code_of("run sample", sample, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
