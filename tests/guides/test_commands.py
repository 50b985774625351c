"""Each `distembed` command of each guide, read from the guide: its options exist, and its config has its settings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from distembed.commands.cli import app
from distembed.training.config import load_config

ROOT = Path(__file__).parents[2]
GUIDES = [
    ROOT / "README.md",
    *sorted(path for room in ("distembed", "launch", "configs", "tools") for path in (ROOT / room).rglob("*.md")),
]
FENCED = re.compile(r"^ *```(?:bash|sh)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
WITH_SETTINGS = ("train", "plan", "describe", "launch", "compress-search")
"""Commands that take a config and settings; those of a guide's own config are checked without it."""
INLINE = re.compile(r"`distembed ([a-z][^`]*)`")


def commands_in_blocks(text: str) -> Iterator[list[str]]:
    """Yields the arguments of each command in the blocks of a guide, without comments and the dots of an ellipsis."""
    for block in FENCED.findall(text):
        without_comments = re.sub(r"(^|\s)#.*", "", block, flags=re.MULTILINE)
        words = shlex.shlex(without_comments.replace("\\\n", " "), posix=True, punctuation_chars="\n|&;()<>")
        words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
        command: list[str] | None = None
        before = "\n"
        for word in [*words, "\n"]:
            if re.fullmatch(r"[\n|&;()<>]+", word):
                if command is not None:
                    # "..." stands for more settings of a kind; a loop's variables are ports
                    yield [re.sub(r"\$\w+", "8000", argument) for argument in command if "..." not in argument]
                command = None
            elif command is not None:
                command.append(word)
            elif word == "distembed" and re.fullmatch(r"[\n|&;()<>]+|-m|--|do|time|\w+=.*", before):
                command = []
            before = word


def command_of(arguments: list[str]) -> tuple[Any, list[str]]:
    """Returns the command that the first words name, and its arguments."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    assert not hasattr(command, "commands") or arguments[:1] == ["--help"] or not arguments, arguments
    return command, arguments


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_take_the_options_and_settings_that_a_guide_gives_them(guide: Path) -> None:
    text = guide.read_text()
    for words in commands_in_blocks(text):
        command, arguments = command_of(words)
        given = command.make_context("distembed", arguments).params  # raises for an option that is not there
        settings, config = given.get("overrides") or [], given.get("config")
        if config is not None and Path(config).parts[0] == "configs":
            assert (ROOT / config).is_file(), f"{guide.name}: {config}"
        if command.name in WITH_SETTINGS and not any(own.startswith("plugins=") for own in settings):
            is_ours = config is not None and (ROOT / config).is_file()
            load_config(ROOT / config if is_ours else None, settings)
    for span in INLINE.findall(text):
        command, arguments = command_of(shlex.split(" ".join(span.split()), comments=True))
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        unknown = {word.split("=")[0] for word in arguments if word.startswith("-")} - options - {"--help"}
        assert not unknown, f"{guide.name}: distembed {span}"
