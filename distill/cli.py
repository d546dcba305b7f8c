"""The command line. A mistake of the user's costs a second and one message: nothing heavy is imported before
work starts.

Exit codes: 0 done; 2 the user can mend it (recipe, missing model or access, another run holds the folder); 3
measured, and the answer is no (a requirement is not met, a candidate not promoted, an export not proven); 130
and 143 interrupted, run the same command to resume; 141 whoever read our output left, such as `head`; 1 a
fault of ours, with its traceback.
"""

import argparse
import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data.errors import UserError
from data.files import disk_is_full
from distill import interrupts
from distill.bench.cli import add_arguments as add_bench_arguments
from distill.export import FORMATS
from distill.json_output import json_output
from distill.redact import redact
from distill.stages import runs_folder
from evaluation.store import database_fault, server_fault, tracking_uri

if TYPE_CHECKING:
    from distill.result import Result

STAGE_COMMANDS = {
    "run": "run every stage: sample, train, evaluate, select, export",
    "sample": "sample the target's answers",
    "train": "distil the drafter on the samples (which are made first where missing)",
    "evaluate": "measure acceptance and speed of the drafter (trained first where missing)",
    "select": "register the drafter in MLflow and decide the champion (measured first where missing)",
    "export": "write the drafter in the form that servers load (trained and measured first where missing)",
}
_RECIPE = "a name in recipes/, or the path of a .yaml file"
_EXPORTED = f"{_RECIPE}; with --out also models:/NAME@champion, models:/NAME/VERSION or models:/m-ID"
_FREE = "free some and run the same command to resume"
_MEND = "mend or free it, or name another (MLFLOW_TRACKING_URI), and run the same command again"
_OUTSIDE_FAULTS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EIO, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        code = _main(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return interrupts.fall_silent()


def _main(words: list[str]) -> int:
    as_json = "--json" in words
    with interrupts.handled(), json_output(as_json) as emit:
        try:
            _check_words(words)
            options = _parser().parse_args(words)
            answer, code = options.command(options)
            if as_json:
                emit(answer)
            return code
        except UserError as error:
            return _fail(str(error), 2, emit)
        except KeyboardInterrupt as error:
            code = error.exit_code if isinstance(error, interrupts.Interrupted) else 130
            return _fail("interrupted; run the same command to resume", code, emit)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and interrupts.reader_left():
                raise
            if error.errno not in _OUTSIDE_FAULTS:
                return _fault(error, emit)
            place = f" ({error.filename})" if error.filename else ""
            return _fail(f"{error.strerror}{place}: mend that and run the same command to resume", 2, emit)
        except Exception as error:
            if disk_is_full(error, runs_folder()):
                return _fail(f"the disk is full ({runs_folder()}): {_FREE}", 2, emit)
            if said := database_fault(error) or server_fault(error):
                return _fail(f"MLflow's store, {tracking_uri(runs_folder())}: {said}; {_MEND}", 2, emit)
            return _fault(error, emit)


def _check_words(words: Sequence[str]) -> None:
    """Half a character comes from a file's name in no UTF-8; no library could open such a file."""
    for word in words:
        if "\0" in word or word.encode(errors="replace").decode() != word:
            raise UserError(f"{word!r} is no text in UTF-8: give it another name")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        allow_abbrev=False, prog="distill", description="Distil, measure, pick and export draft models."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, text in STAGE_COMMANDS.items():
        command = _recipe_command(commands, name, text, _EXPORTED if name == "export" else _RECIPE)
        command.add_argument("--fresh", action="store_true", help="set earlier outputs aside and begin again")
        command.add_argument(
            "--accelerate",
            default="single",
            metavar="NAME",
            help="sample and train in the processes of recipes/accelerate/NAME.yaml or a .yaml file (single)",
        )
        if name == "evaluate":
            command.add_argument(
                "--require",
                action="append",
                default=[],
                metavar="MEASURE>=NUMBER",
                help="exit 3 with the reason where this does not hold, such as speedup>=1.5 or lossless",
            )
        command.set_defaults(command=_run, stage=name)
        if name == "export":
            _export_options(command)
    preflight = _recipe_command(commands, "preflight", "say what a recipe needs and what is missing")
    preflight.set_defaults(command=_preflight)
    show = _recipe_command(commands, "show", "print one sample, with the tokens that are trained marked")
    show.add_argument("--index", type=int, default=0, metavar="N", help="which one, from 0; -1 is the last")
    show.set_defaults(command=_show)
    compare = _command(commands, "compare", "rank the candidates of all runs by measured speedup")
    compare.add_argument("--html", metavar="FILE", type=Path, help="write the comparison as one page")
    compare.set_defaults(command=_compare)
    text = "measure our speed beside that of peers, or losses, shapes and kinds of drafters beside each other"
    bench = commands.add_parser("bench", allow_abbrev=False, help=text, description=text)
    add_bench_arguments(bench)
    bench.set_defaults(command=_bench)
    text = "measure a candidate against the champion, in turns, and crown it where it is surely faster"
    promote = _command(commands, "promote", text)
    promote.add_argument("candidate", help="models:/NAME/VERSION, or m-ID (`distill compare --json`)")
    promote.set_defaults(command=_promote)
    sync = _command(commands, "sync", "send what was kept here while the MLflow server was gone")
    sync.set_defaults(command=_sync)
    report = _recipe_command(commands, "report", "evaluate, and open the report of the drafter")
    report.set_defaults(command=_report)
    return parser


def _recipe_command(commands: Any, name: str, text: str, recipe: str = _RECIPE) -> argparse.ArgumentParser:
    command = _command(commands, name, text)
    command.add_argument("recipe", help=recipe)
    command.add_argument(
        "--set", action="append", default=[], metavar="A.B=VALUE", help="change a setting; repeatable"
    )
    return command


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, allow_abbrev=False
    )
    command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return command


def _export_options(command: argparse.ArgumentParser) -> None:
    """A place of the user's own for the export, which may then be any registered candidate."""
    command.add_argument("--out", type=Path, metavar="DIR", help="write here, not in the stage's folder")
    command.add_argument("--format", choices=FORMATS, default="hf", help="with --out: what to write (hf)")
    command.add_argument("--force", action="store_true", help="with --out: replace an earlier export there")
    command.add_argument(
        "--verify", action="store_true", help="with --out: load it again, decode with it, and time llama.cpp"
    )
    command.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.identity import model_form

    registered = model_form(options.recipe) == "candidate"
    if options.out is None:
        if registered or options.force or options.verify or options.format != "hf":
            raise UserError(
                "give --out DIR, where to write the export; --format, --force and --verify need it"
            )
        return _run(options)
    if options.fresh or (registered and options.set):
        raise UserError("--fresh and --set are for a recipe's stages: leave them out here")
    from distill.export.command import check_kind, check_request, export, report

    check_request(options.format, options.out, force=options.force, verify=options.verify)
    reference = options.recipe
    if not registered:  # the recipe's own candidate, trained and registered first where missing
        from distill.recipe import load_recipe

        check_kind(reference, load_recipe(reference, options.set), options.format)
        selection = _run_stages(options, "select").read("select", "selection.json")
        assert selection is not None
        reference = f"models:/{selection['model_id']}"
    answer = export(
        reference,
        options.format,
        options.out,
        runs_folder(),
        force=options.force,
        verify=options.verify,
        say=_say,
    )
    if not options.json:
        print(report(answer))
    return answer, 3 if (answer["verification"] or {}).get("faults") else 0


def _run(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.gate import parse, unmet
    from distill.summary import print_summary

    required = [parse(text) for text in getattr(options, "require", [])]
    result = _run_stages(options, options.stage)
    if not options.json:
        print_summary(result)
    answer = result.to_json()
    if not required:
        return answer, 0
    answer["unmet"] = unmet(required, answer["evaluation"])
    for reason in answer["unmet"]:
        _say(f"FAILED: {reason}")
    return answer, 3 if answer["unmet"] else 0


def _run_stages(options: argparse.Namespace, stage: str) -> "Result":
    from distill.preflight import check
    from distill.processes import read_processes
    from distill.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    processes = read_processes(getattr(options, "accelerate", "single"))
    findings = check(recipe, runs_folder())
    findings.raise_if_blocked()

    from distill.pipeline import run

    return run(recipe, runs_folder(), stage, fresh=options.fresh, say=_say, processes=processes)


def _report(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    import webbrowser

    options.stage, options.fresh = "evaluate", False
    answer, code = _run(options)
    page = Path(answer["stages"][-1]["directory"]) / "report.html"
    _say(f"report: {page}")
    if not options.json:
        webbrowser.open(page.as_uri())
    return {"report": str(page)}, code


def _sync(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.sync import sync

    sent = sync(runs_folder(), _say)
    if not options.json:
        print(f"{sent['runs']} runs and {sent['candidates']} candidates sent")
    return {**sent}, 0


def _promote(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.promote import promote

    decision = promote(options.candidate, runs_folder(), _say)
    if not options.json:
        standing = "is now champion" if decision.promoted else "is not champion"
        print(f"{decision.name} version {decision.version} {standing}: {decision.reason}")
    return {**vars(decision)}, 0 if decision.promoted else 3


def _preflight(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.cost_estimate import estimate
    from distill.preflight import check
    from distill.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.set)
    findings = check(recipe, runs_folder())
    if not findings.blocked:
        findings.items.append(estimate(recipe, runs_folder() / "cache"))
    if not options.json:
        print(findings.text())
    return findings.to_json(), 2 if findings.blocked else 0


def _show(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.recipe import load_recipe
    from distill.show import render, show

    answer = show(load_recipe(options.recipe, options.set), runs_folder(), options.index, _say)
    if not options.json:
        print(render(answer))
    return answer, 0


def _compare(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from data.files import check_replaceable, write_atomic
    from distill.preflight import require_tracking
    from distill.summary import console
    from evaluation.comparison import render, to_json
    from evaluation.registry import candidates
    from evaluation.selection import rank

    require_tracking()
    if options.html:
        check_replaceable(options.html)
    groups = rank(candidates(tracking_uri(runs_folder())))
    if options.html:
        from evaluation.report import comparison_page

        write_atomic(options.html, comparison_page(groups))
        _say(f"comparison: {options.html}")
    if not options.json:
        console().print(render(groups) if groups else "no candidates yet: `make distill` makes the first")
    return to_json(groups), 0


def _bench(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    from distill.bench.cli import measure

    found, text = measure(options, _say)
    if not options.json:
        print(text)
    return found, 0


def _say(text: str) -> None:
    print(redact(text), file=sys.stderr, flush=True)


def _fail(message: str, code: int, emit: Callable[[dict[str, Any]], None]) -> int:
    message = redact(message)
    print(message, file=sys.stderr, flush=True)
    emit({"error": message})
    return code


def _fault(error: Exception, emit: Callable[[dict[str, Any]], None]) -> int:
    print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
    emit({"error": redact(f"{type(error).__name__}: {error}")})
    return 1


if __name__ == "__main__":
    sys.exit(main())
