"""`tpplan completion bash|zsh`: prints a script that completes verbs, options and their values in that shell.

eval "$(tpplan completion bash)"        # in ~/.bashrc; for zsh, `tpplan completion zsh` in ~/.zshrc, after compinit
"""

import argparse
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from tpplan.commands.terminal.output import write
from tpplan.commands.terminal.verbs import add_verb

if TYPE_CHECKING:
    from argparse import _SubParsersAction

#: zsh runs bash's completions where it is asked to
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
#: the place is the verbs before the word, then the option before it; files are offered where nothing else is known
_SCRIPT = """\
_tpplan() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" place="" next i found=""
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="$place ${COMP_WORDS[i]}"
    case "$next" in
      %(verbs)s) place="$next" ;;
    esac
  done
  case "$place $before" in
%(values)s
    *) case "$place" in
%(options)s
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$found" -- "$word"))
  if [[ ${#COMPREPLY[@]} -eq 0 && "$word" != -* ]]; then COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -o filenames -F _tpplan tpplan
"""


def add_parser(subparsers: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = add_verb(subparsers, "completion", "print a script for the shell's completion", __doc__)
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads the script")
    parser.set_defaults(run=lambda args: run(args, subparsers))


def run(args: argparse.Namespace, verbs: "_SubParsersAction[argparse.ArgumentParser]") -> int:
    """Prints the script."""
    write((_ZSH if args.shell == "zsh" else "") + script(verbs))
    return 0


def script(verbs: "_SubParsersAction[argparse.ArgumentParser]") -> str:
    """The script for bash that completes these verbs and those below them."""
    places = dict(_places("", verbs.choices))
    words = {"": [*verbs.choices, "-h", "--help", "--version", "-v", "--verbose"]}
    values = dict[str, list[str]]()
    for place, parser in places.items():
        words[place] = list(_words(parser))
        values |= {f"{place} {option}": choices for option, choices in _choices(parser)}
    return _SCRIPT % {
        "verbs": "|".join(map(_quoted, places)),
        "values": "\n".join(f"    {_quoted(place)}) found={_quoted(' '.join(own))} ;;" for place, own in values.items())
        or "    '') ;;",
        "options": "\n".join(
            f"      {_quoted(place)}) found={_quoted(' '.join(own))} ;;" for place, own in words.items()
        ),
    }


def _places(above: str, verbs: Mapping[str, argparse.ArgumentParser]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields (verbs so far, each after a space, parser), also of verbs below verbs."""
    for name, parser in verbs.items():
        place = f"{above} {name}"
        yield place, parser
        for action in parser._actions:
            if isinstance(action.choices, Mapping):  # verbs below this one
                yield from _places(place, action.choices)


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields the verbs below, the choices of positional arguments, and the options."""
    for action in parser._actions:
        yield from action.option_strings or map(str, action.choices or ())


def _choices(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    """Yields (option, its values) of options that name their values."""
    for action in parser._actions:
        for option in action.option_strings if action.choices else ():
            yield option, list(map(str, action.choices or ()))


def _quoted(text: str) -> str:
    """The text for bash, with quotes also where none are needed."""
    return f"'{text}'" if re.fullmatch(r"[\w .,:+|-]*", text) else shlex.quote(text)
