"""The ``distembed`` command: joins the commands of :mod:`distembed.commands` and of launch, and ends with an exit code.

Exit codes: 0 done, 1 failed, 2 wrong input, 3 a plan that does not fit, 75 interrupted: go on with --resume. Mistakes
that a user can mend are printed as a sentence, without a traceback. Heavy imports happen within the commands:
``--help`` is fast and ``doctor`` works on a broken install.
"""

import errno
import os
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from distembed.base.errors import InsufficientMemory, Interrupted, RunError, UserError
from distembed.base.plugins import require_none_being_imported
from distembed.base.process import end_with_parent, silence_loggers
from distembed.base.version import __version__
from distembed.commands import inspect, plan, prepare, reproduce, serving, sweep, train
from distembed.commands.error_file import record_error, user_exit_code
from distembed.commands.shared import errors
from distembed.launch import commands as launch

INTERRUPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again
_WRONG, _FAILED = "[bold red]error:[/]", "[bold red]failed:[/]"
_WRONG_PATHS = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)

# typer's errors of options and arguments: click's own class, or that of the copy of click in newer releases
_WrongUsage: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="distembed",
    help="Train click-through models and recommenders with compressed, sharded embedding tables.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for group in (prepare.app, plan.app, train.app, serving.app, sweep.app, reproduce.app, inspect.app, launch.app):
    app.add_typer(group)  # without a name: its commands become the app's own


def _print_versions(wanted: bool) -> None:
    """Prints the versions of distembed and of the packages that results depend on, without loading them, and ends."""
    if wanted:
        from distembed.base.version import versions

        packages = [f"{name} {version}" for name, version in versions().items() if name != "distembed"]
        print(f"distembed {__version__}\n{', '.join(packages)}")
        raise typer.Exit


@app.callback()
def _silence_libraries(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Print versions and end.")
    ] = False,
) -> None:
    """Keeps warnings of TorchRec and torch that no user can act on out of the output; runs before every command."""
    silence_loggers()
    warnings.filterwarnings("ignore", module=r"torchrec\.|torch\.distributed")
    warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)


def _limit_openmp_spinning() -> None:
    """Makes OpenMP's threads sleep at a barrier after a short spin; has to be called before torch is loaded.

    By default they spin for milliseconds at every barrier. One other busy process on two cores then slowed training
    from 20,000 to 400 samples/s; with a short spin to 7,000. Alone, it costs a few percent.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    _limit_openmp_spinning()
    for stream in (sys.stdout, sys.stderr):
        # characters of an odd file name that the stream's encoding lacks are no reason to fail
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    end_with_parent()
    try:
        require_none_being_imported()
        code = app(standalone_mode=False)
    except _WrongUsage as error:
        text = _usage_error(error)
        if not text:  # help was shown, for want of any argument
            _leave(2)
        _end(2, f"{_WRONG} {_escape(text)}")
    except SystemExit as ended:
        _leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except UnicodeEncodeError as error:
        _end(2, f"{_WRONG} {_escape(ascii(error.object))} is not written in UTF-8; give another name.")
    except Exception as error:
        shown = _explained(error)
        code, heading = _outcome(shown)
        is_told = not isinstance(shown, Interrupted) and record_error(shown, code)
        if not heading:
            raise
        _end(code, "" if is_told else f"{heading} {_escape(shown)}")
    if code == 130:  # typer's answer to Ctrl-C
        _end(INTERRUPTED_EXIT_CODE, "[bold yellow]interrupted[/]")
    _leave(code or 0)


def _explained(error: Exception) -> Exception:
    """Returns an error that names ``distembed doctor --fix`` in place of a missing module that it installs."""
    installed_by_fix = ("torch", "torchrec", "fbgemm_gpu", "torchx")
    if not isinstance(error, ModuleNotFoundError) or error.name not in installed_by_fix:
        return error
    return RunError(f"{error.name} is not installed: `distembed doctor --fix` installs the tested version.")


def _outcome(error: Exception) -> tuple[int, str]:
    """Returns the exit code of an error and the heading of its message; "" for a defect, which has a traceback."""
    if isinstance(error, UserError):
        return user_exit_code(error), _WRONG
    if isinstance(error, Interrupted):
        return INTERRUPTED_EXIT_CODE, "[bold yellow]interrupted:[/]"
    if isinstance(error, InsufficientMemory):
        return 3, _FAILED
    if isinstance(error, OSError) and error.errno in _WRONG_PATHS:
        return 2, _WRONG
    if isinstance(error, RunError | OSError):
        return 1, _FAILED
    # Python and PyArrow have types for it, and torch a message on a CPU
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"} or "can't allocate memory" in str(error):
        return 1, f"{_FAILED} there is not enough memory:"
    return 1, ""


def _usage_error(error: Any) -> str:
    """Returns typer's error about options or arguments as a sentence that names the command's help."""
    text = str(error.format_message()).rstrip(".")
    if not text or getattr(error, "ctx", None) is None:
        return text
    return f"{text}{' See' if text.endswith('?') else '; see'} `{error.ctx.command_path} --help`."


def _escape(error: BaseException | str) -> str:
    """Returns the message and the notes of an error as text that rich prints unchanged."""
    from rich.markup import escape

    return escape("\n".join([str(error), *getattr(error, "__notes__", [])]))


def _end(code: int, message: str) -> NoReturn:
    """Prints a message, with the rank where that is not 0, or nothing where it is empty, and ends the process."""
    rank = os.environ.get("RANK", "0")
    if message:
        errors.print(message if rank == "0" else f"rank {rank}: {message}", highlight=False, soft_wrap=True)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process with an exit code."""
    if "RANK" in os.environ:
        # One of several ranks: a gloo thread that is late with its last message asks for the interpreter after that has
        # ended, which aborts a process whose work is done and written. So the process ends before the interpreter does.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
