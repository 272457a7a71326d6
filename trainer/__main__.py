"""`python -m trainer train CONFIG`, `plan CONFIG`, `doctor CONFIG`, `data CONFIG`, `bench CONFIG`, `export RUN|CKPT`,
`schema`, and `generate`, `evaluate`, `synthesize` and `regenerate` (`decode/command.py`): parse, catch signals before
anything slow is imported, run, and say how it ended.

Exit code: 0 finished or stopped, 1 a worker or a check of the doctor's failed, more of the data is bad than a run
accepts, or an export does not decode as it was trained, 2 usage or configuration; 143 or 130 when a second signal, more
than 5 s after the first, ended it at once. Verbs that train nothing: 130 interrupted, 141 nobody read the output to its
end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from trainer.config import ConfigError, check_inputs, expand_path, load_config
from trainer.decode import command as decoding
from trainer.distributed.ranks import ranks_from_environment, settled
from trainer.distributed.reporting import refuse, reporter_for
from trainer.inputs import drafter_problem
from trainer.report import tracking
from trainer.report.console import complain, terminal
from trainer.report.records import RunIdentity, identity_from_environment
from trainer.stopping import StopRequest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Train a DFlash drafter, decode with it.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    train_verb = decoding.add_verb(verbs, "train", "train as CONFIG says")
    train_verb.add_argument("config", metavar="CONFIG", help="YAML file; see configs/")
    train_verb.add_argument("--resume", action="store_true", help="go on from the latest complete checkpoint, or fail")
    plan_verb = decoding.add_verb(verbs, "plan", "say what would compile and how much memory it takes; train nothing")
    plan_verb.add_argument("config", metavar="CONFIG", help="YAML file; see configs/")
    doctor_verb = decoding.add_verb(verbs, "doctor", "look for what would spoil the run, such as leaks")
    doctor_verb.add_argument("config", metavar="CONFIG", help="YAML file; see configs/")
    doctor_verb.add_argument("--quick", action="store_true", help="look into fewer blocks and positions")
    doctor_verb.add_argument("--json", action="store_true", help="print all findings and figures as JSON")
    data_verb = decoding.add_verb(verbs, "data", "show what would be trained on, what is dropped, why; train nothing")
    data_verb.add_argument("config", metavar="CONFIG", help="YAML file; see configs/")
    data_verb.add_argument("--samples", metavar="N", type=int, default=3, help="documents to show (3)")
    data_verb.add_argument("--row", metavar="WHERE", help="show this one, such as chat.jsonl:17, or why it is dropped")
    data_verb.add_argument("--json", action="store_true", help="all of it as JSON")
    bench_verb = decoding.add_verb(verbs, "bench", "train some steps, keep nothing, say what took how long")
    bench_verb.add_argument("config", metavar="CONFIG", help="YAML file; see configs/")
    bench_verb.add_argument("--steps", type=int, default=30, metavar="N", help="that are measured (default: 30)")
    bench_verb.add_argument("--json", action="store_true", help="print the figures as JSON")
    export_verb = decoding.add_verb(verbs, "export", "make a directory that SGLang and vLLM load; see docs/export.md")
    export_verb.add_argument("checkpoint", metavar="RUN|CKPT", help="a run's directory, or one of its checkpoints")
    export_verb.add_argument("--to", metavar="DIR", help="where it goes (export, in the run's directory)")
    export_verb.add_argument("--format", choices=["zlab", "speculators"], default="zlab",
                             help="zlab: SGLang and vLLM; speculators: vLLM and the package speculators (zlab)")
    export_verb.add_argument("--weights", choices=["auto", "last", "ema"], default="auto",
                             help="auto: the moving average, where one is kept (auto)")
    export_verb.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                             help="auto: what the drafter computed in (auto)")
    export_verb.add_argument("--target", metavar="DIR", help="where the target lies now, if not where it was")
    export_verb.add_argument("--target-name", metavar="NAME",
                             help="what the package speculators loads as the target (its path)")
    export_verb.add_argument("--no-gate", dest="gate", action="store_false",
                             help="do not look whether it decodes as it was trained; the contract will say so")
    export_verb.add_argument("--prompts", metavar="FILE", help="for the gate, one on each line (built-in ones)")
    export_verb.add_argument("--device", metavar="DEVICE", help="of the gate: cpu, cuda:0 (a GPU if there is one)")
    export_verb.add_argument("--arithmetic", choices=["float32", "bfloat16"], default="float32",
                             help="of the gate; in bfloat16 it takes half the memory and sees less (float32)")
    export_verb.add_argument("--json", action="store_true", help="what came of it as JSON")
    decoding.add_verb(verbs, "schema", "print the JSON Schema of CONFIG, for editors")
    decoding.add_verbs(verbs)
    arguments = parser.parse_args(argv)
    if arguments.verb != "train":
        return answer(arguments)

    ranks = ranks_from_environment(os.environ)
    stop = StopRequest()
    if ranks is None:
        stop.listen()
    else:  # nothing to say before it trains: the signal itself ends it, also where it waits for the others
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        config = settled(load_config(arguments.config), ranks)
        identity = identity_from_environment(os.environ)
        if identity is None:
            directory = expand_path(config.output_dir, key="output_dir").absolute()
            identity = RunIdentity(directory=directory, run_id=directory.name)
        reporter = reporter_for(identity, ranks)
        reporter.open()
    except ConfigError as error:
        refuse(str(error), ranks)
        return 2
    stop.on_exit = reporter.last_words
    reporter.phase("import")
    try:
        # A run with checkpoints goes on from one of those.
        check_inputs(config, starts=drafter_problem(identity.directory / "checkpoints") is not None)
        tracking.check(config.tracking, os.environ)
        # torch takes seconds, and the phase says so
        if ranks is not None:
            from trainer.distributed.training import train as train_together

            ending = train_together(config, reporter, stop, ranks, must_resume=arguments.resume)
        else:
            from trainer.train import train

            ending = train(config, reporter, stop, must_resume=arguments.resume)
    except ConfigError as error:
        refuse(str(error), ranks)
        reporter.ended(code=2, stopped=False, error=str(error))
        return 2
    except Exception as error:
        reporter.exception(None, error)
        reporter.ended(code=1, stopped=False)
        return 1
    stuck = ending.stuck + reporter.ended(code=ending.code, stopped=ending.stopped)
    if stuck:
        # A thread inside a kernel cannot be stopped, and would take the interpreter's shutdown down with it.
        reporter.complain(f"left behind: {', '.join(stuck)}")
    if stuck or (ranks is not None and ending.code):  # or it would wait for processes that have gone
        sys.stdout.flush()
        os._exit(ending.code)
    return ending.code


def answer(arguments: argparse.Namespace) -> int:
    """Of the verbs that train nothing: they may be interrupted, and nobody has to read them to their end."""
    try:
        if arguments.verb == "schema":
            code = print_schema()
        elif arguments.verb == "plan":
            code = print_plan(arguments.config)
        elif arguments.verb == "bench":
            code = measure(arguments.config, steps=max(1, arguments.steps), as_json=arguments.json)
        elif arguments.verb == "export":
            code = make_export(arguments)
        elif arguments.verb == "doctor":
            code = examine(arguments.config, quick=arguments.quick, as_json=arguments.json)
        elif arguments.verb in decoding.VERBS:
            code = decoding.answer(arguments)
        else:
            code = print_data(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except (BrokenPipeError, SystemExit):  # the latter is how rich says it
        # What is left in the buffer would be tried once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def print_plan(path: str) -> int:
    config = load_config(path)
    check_inputs(config)
    from trainer.plan.forecast import forecast

    print(forecast(config), flush=True)
    return 0


def examine(path: str, *, quick: bool, as_json: bool) -> int:
    try:
        config = load_config(path)
        check_inputs(config)
        from trainer.doctor.examine import doctor

        return doctor(config, quick=quick, as_json=as_json)
    except KeyboardInterrupt:
        complain("the doctor was interrupted; what it has not come to is not known")
        return 130


def measure(path: str, *, steps: int, as_json: bool) -> int:
    stop = StopRequest()
    stop.listen()
    config = load_config(path)
    if config.engine in ("ddp", "fsdp2"):
        raise ConfigError(f"engine: {config.engine} is not what this measures; leave it out to see threads")
    check_inputs(config)
    from trainer import bench

    found = bench.bench(config, stop, steps=steps)
    if found is None:
        return 1
    if not found["workers"]:
        complain(bench.sentence(found))
        return 1
    if as_json:
        print(json.dumps(found, indent=1), flush=True)
    else:
        terminal().print(bench.table(found))
    return 0


def make_export(arguments: argparse.Namespace) -> int:
    from trainer.export.command import export

    return export(arguments, page=terminal(), say=complain)


def print_data(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    check_inputs(config, weights=False)
    from trainer.data import report

    # What is said meanwhile is no part of the answer.
    found = report.report(config, samples=max(0, arguments.samples), row=arguments.row, say=complain)
    if arguments.json:
        print(report.as_json(found), flush=True)
    else:
        report.show(found, terminal())
    return 1 if found.refusal and arguments.row is None else 0


def print_schema() -> int:
    from trainer.config import Config
    from typedyaml.jsonschema import json_schema

    print(json.dumps(json_schema(Config, title="a trainer's configuration"), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
