"""What the READMEs show, as data: fenced blocks with the mark before each, links, and names of files.

A block of ```sh, ```bash or ```python has an HTML comment on the line before it, which says who runs it:

    <!-- run -->                  tests/test_readmes.py, in order, in one folder per README
    <!-- file: train.py -->       nobody; it is written to that file, which later blocks use
    <!-- output of: COMMAND -->   the block is what the command prints; a line "..." stands for lines left out
    <!-- long output of: COMMAND -->   and that with -m long alone
    <!-- long -->                 tests/test_readmes.py with -m long: minutes
    <!-- tested: tests/a.py -->   those tests
    <!-- needs a GPU -->          nobody without one
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "profiles/README.md", "scripts/README.md", "scripts/examples/README.md", "tpplan/README.md")

#: languages whose blocks must say who runs them
RUNNABLE = ("sh", "bash", "python")
MARK = re.compile(r"<!-- (run|file|output of|long output of|long|tested|needs a GPU)(?:: (.+?))? -->")
_FENCE = re.compile(r"^```(\w*)$")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"`([^`\n]+)`")
#: a file or folder of the checkout, as prose and commands name it
_PATH = re.compile(r"(?<![\w./<-])((?:tests|scripts|profiles|tpplan|\.ci)/[\w./-]*\w)")
#: a command in a block that is indented, where no mark can stand
_INDENTED = re.compile(r"^ {4}(?:tpplan|torchrun|python|scripts/)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: the line its fence stands on, its language, its mark with what stands behind it, its text."""

    line: int
    language: str
    mark: str | None
    value: str
    text: str

    def commands(self) -> list[list[str]]:
        """The commands of a block for the shell, as words."""
        joined = self.text.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def blocks_of(text: str) -> list[Block]:
    """Every fenced block of a Markdown text, in order."""
    found, lines, start = [], text.splitlines(), None
    language = ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if start is None and fence:
            start, language = number, fence[1]
        elif start is not None and line == "```":
            mark = MARK.fullmatch(lines[start - 1]) if start else None
            found.append(
                Block(
                    line=start + 1,
                    language=language,
                    mark=mark[1] if mark else None,
                    value=(mark[2] or "") if mark else "",
                    text="\n".join(lines[start + 1 : number]) + "\n",
                )
            )
            start = None
    assert start is None, f"line {start}: a block without an end"
    return found


def unmarked(text: str) -> list[str]:
    """Blocks that nobody runs, and commands where no mark can stand."""
    fenced = [f"line {b.line}: no mark before ```{b.language}" for b in blocks_of(text) if _wants_mark(b)]
    outside = re.sub(r"^```.*?^```$", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    indented = [f"line {n}: {line.strip()}" for n, line in enumerate(outside.splitlines(), 1) if _INDENTED.match(line)]
    return fenced + indented


def _wants_mark(block: Block) -> bool:
    return block.language in RUNNABLE and block.mark is None


def links(text: str) -> list[str]:
    """Targets of relative links."""
    return [target for target in _LINK.findall(text) if "://" not in target]


def named_files(text: str) -> list[str]:
    """Paths of the checkout that prose in code quotes, commands, and marks name."""
    marks = (block.value for block in blocks_of(text) if block.mark == "tested")
    shown = (block.text for block in blocks_of(text) if block.language in RUNNABLE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return sorted({path for part in (*marks, *shown, *_CODE.findall(prose)) for path in _PATH.findall(part)})


#: a function or class with the file it is in: `search` ([search/branch_and_bound.py](search/branch_and_bound.py))
_DEFINED = re.compile(r"`(\w+)`\s+(?:in\s+|\()\[[^\]]+\]\(([^)]+\.py)\)")


def named_definitions(text: str) -> list[tuple[str, str]]:
    """Each function or class that stands before a link to its file, and the link's target."""
    return [(found[1], found[2]) for found in _DEFINED.finditer(text)]
