"""`winnow bench`: the options of each suite, and the calls that they make."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from winnow.commands.bench_kernels import add_kernels
from winnow.commands.conditions import add_condition_options, conditions
from winnow.commands.engine_options import (
    add_engine_options,
    add_model,
    build_options,
    engine_config,
)
from winnow.commands.parsing import JSON_HELP, at_least, command, number, output_file
from winnow.errors import RequestError

TOOLS = ("aiperf", "guidellm", "vllm")
_COUNT = at_least(1)
_LOCAL = ("localhost", "127.0.0.1", "::1")


def add_bench(commands: Any) -> None:
    """Register the command and its suites."""
    bench = commands.add_parser("bench", help="measurements and checks")
    suites = bench.add_subparsers(title="suites", required=True, metavar="SUITE")
    _add_conformance(suites)
    add_kernels(suites)
    _add_step(suites)
    _add_serving(suites)
    _add_import(suites)
    _add_capacity(suites)
    command(suites, "workloads", _workloads, "what the named workloads of `serving` send")


def _add_conformance(suites: Any) -> None:
    parser = command(
        suites, "conformance", _conformance, "compare a backend with the reference, op by op"
    )
    backend = "one that `winnow backends` lists"
    parser.add_argument("--backend", default="cpu", metavar="NAME", help=backend)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def _conformance(args: argparse.Namespace) -> int:
    from winnow.bench.conformance import as_json, conformance, render

    reports = conformance(args.backend)
    print(json.dumps(as_json(reports), indent=1) if args.json else render(reports))
    return 1 if any(report.failed for report in reports) else 0


def _add_step(suites: Any) -> None:
    parser = command(suites, "step", _step, "time engine steps by part, without HTTP")
    add_model(parser)
    add = parser.add_argument
    add("--context", type=_list(_COUNT), default=[4096], metavar="N,...", help="tokens a request")
    add("--batch", type=_list(_COUNT), default=[1], metavar="N,...", help="requests of a step")
    add("--steps", type=_COUNT, default=16, metavar="N", help="decode steps of each repeat")
    add(
        "--repeats",
        type=_COUNT,
        default=3,
        metavar="N",
        help="times each shape is run anew; on a CPU",
    )
    add("--threads", type=_COUNT, metavar="N", help="of the CPU; default: torch's own choice")
    _add_out(parser)
    add_engine_options(parser.add_argument_group("engine"))


def _step(args: argparse.Namespace) -> int:
    import torch

    from winnow.bench.parts import breakdown
    from winnow.bench.record import append
    from winnow.bench.step import Shape, run, step_records
    from winnow.engine.build import build_engine

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.no_prefix_caching = True
    engine = build_engine(args.model, engine_config(args), **build_options(args))
    shapes = [Shape(batch, context) for batch in args.batch for context in args.context]
    say = {"weights": "random" if args.random_weights else "of the checkpoint"}
    if engine.runner.storage.rows.is_cuda:
        return _device_step(args, engine, shapes, say)
    for found in run(engine, shapes, args.steps, args.repeats):
        records = step_records(engine, args.model, found, _run_id(), say)
        whole, parts = breakdown(records)
        print(
            f"{found.what}, {found.rows} rows, {found.shape.requests} x {found.shape.context} "
            f"tokens: {records[0].median:.2f} ms, median of {len(found.seconds)}; parts are means "
            "over the middle half:"
        )
        for part, spent in parts.items():
            print(f"  {part:34} {spent:9.3f} ms {spent / whole:6.1%}")
        if args.out is not None:
            append(args.out, records)
    return 0


def _device_step(
    args: argparse.Namespace, engine: Any, shapes: list[Any], say: dict[str, str]
) -> int:
    """Steps of a GPU: each part beside the least that it can take."""
    from winnow.bench.floors import measured_rates, step_table
    from winnow.bench.record import append
    from winnow.bench.step import run_on_device, step_records

    rates = measured_rates()
    print(
        f"this GPU reads {rates.read / 1e12:.2f} TB/s and multiplies {rates.products / 1e12:.0f} "
        "TFLOP/s in bf16; floors are bytes or operations at these rates"
    )
    for measured in run_on_device(engine, shapes, args.context, args.steps):
        print(step_table(engine, measured, rates), flush=True)
        run_id = _run_id()
        for found in measured:
            records = step_records(engine, args.model, found, f"{run_id} {found.timing}", say)
            if args.out is not None:
                append(args.out, records)
    return 0


def _add_serving(suites: Any) -> None:
    parser = command(
        suites, "serving", _serving, "load an OpenAI-compatible server, with AIPerf, and record it"
    )
    rates = number(float, lambda x: 0 < x <= 1e6, "a number of requests a second above 0")
    seconds = number(float, lambda x: 0 < x <= 1e6, "a number of seconds above 0")
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="of the server, without /v1")
    add(
        "--workload",
        metavar="NAME",
        default="fixed-256-64",
        help="one that `winnow bench workloads` lists",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_list(_COUNT),
        default=[1],
        metavar="N,...",
        help="users of a closed loop, each its own run",
    )
    load.add_argument(
        "--request-rate",
        type=_list(rates),
        metavar="R,...",
        help="Poisson arrivals a second instead, each its own run",
    )
    add("--requests", type=_COUNT, metavar="N", help="requests or sessions of each run in all")
    add("--model", metavar="NAME", help="default: the one model that the server lists")
    add("--tokenizer", metavar="DIR", help="that prompts are made with; default: the model's")
    add("--honour-eos", action="store_true", help="let answers end before their set length")
    add("--seed", type=at_least(0), default=1, metavar="N", help="of prompts and arrivals")
    add("--timeout", type=seconds, default=3600.0, metavar="S", help="seconds a run may take")
    add(
        "--artifacts",
        type=Path,
        default=Path("build/aiperf"),
        metavar="DIR",
        help="new directory for AIPerf's own files",
    )
    _add_out(parser)
    _add_server_options(parser.add_argument_group("what serves"))
    add_condition_options(parser.add_argument_group("conditions"))


def _serving(args: argparse.Namespace) -> int:
    from winnow.bench.aiperf import Load, find
    from winnow.bench.record import append
    from winnow.bench.serving import Plan, measure, target
    from winnow.bench.workloads import workload

    chosen = workload(args.workload)
    find()
    machine, software, commit = _server(args, urlparse(args.url).hostname in _LOCAL)
    loads = [Load(concurrency=users) for users in args.concurrency]
    if args.request_rate is not None:
        if args.requests is None:
            raise RequestError("arrivals at a rate have no users to count: give --requests")
        loads = [Load(rate=rate) for rate in args.request_rate]
    plan = Plan(
        workload=chosen,
        loads=loads,
        conditions=conditions(args),
        machine=machine,
        software=software,
        commit=commit,
        seed=args.seed,
        per_load=args.requests,
        honour_eos=args.honour_eos,
        timeout_s=args.timeout,
    )
    for records in measure(target(args.url, args.model, args.tokenizer), plan, args.artifacts):
        _print_run(records)
        if args.out is not None:
            append(args.out, records)
    return 0


def _workloads(args: argparse.Namespace) -> int:
    from winnow.bench.workloads import workloads

    for chosen in workloads().values():
        each = f"{chosen.per_user} {chosen.count} a user after {chosen.warmup_per_user} of warm-up"
        print(f"{chosen.name}\n  {chosen.about}; {each}")
    return 0


def _add_import(suites: Any) -> None:
    parser = command(suites, "import", _import, "turn another tool's export into records")
    parser.add_argument("tool", choices=TOOLS, help="that wrote the export")
    parser.add_argument(
        "export",
        type=Path,
        metavar="PATH",
        help="AIPerf's artifact directory, guidellm's JSON, or the detailed result of "
        "vllm bench serve",
    )
    parser.add_argument("--workload", required=True, metavar="NAME", help="what was sent, in words")
    _add_out(parser)
    _add_server_options(parser.add_argument_group("what served"))
    add_condition_options(parser.add_argument_group("conditions"))


def _import(args: argparse.Namespace) -> int:
    from winnow.bench.exports import READERS
    from winnow.bench.record import append
    from winnow.bench.runs import serving_records

    machine, software, commit = _server(args, local=False)
    for run in READERS[args.tool](args.export):
        workload = {"name": args.workload}
        records = serving_records(run, workload, conditions(args), machine, software, commit)
        _print_run(records)
        if args.out is not None:
            append(args.out, records)
    return 0


def _add_capacity(suites: Any) -> None:
    parser = command(
        suites, "capacity", _capacity, "turn what `winnow plan --json` says to records"
    )
    parser.add_argument("plan", type=Path, metavar="FILE", help="JSON of one plan or several")
    _add_out(parser)


def _capacity(args: argparse.Namespace) -> int:
    from winnow.bench.capacity import capacity_records
    from winnow.bench.record import append

    records = capacity_records(args.plan)
    for record in records:
        model, plan = record.workload["model"], record.conditions["parallel"]["plan"]
        print(f"{model}, {plan}: {record.what} {record.median:,.0f} {record.unit}")
    if args.out is not None:
        append(args.out, records)
    return 0


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=output_file, metavar="FILE", help="file of JSON lines to add records to"
    )


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--machine", metavar="TEXT", help="it ran on; needed unless it is this one")
    add("--server", metavar="TEXT", help="its name and version; default: this winnow")
    add("--commit", metavar="ID", help="its commit; default: this winnow's")


def _server(args: argparse.Namespace, local: bool) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Machine, software and commit of what serves; RequestError for what must be said."""
    from winnow import __version__
    from winnow.bench.machine import commit, machine, software

    if args.machine is None and not local:
        raise RequestError("a figure without its machine says nothing: give --machine")
    if (args.server is None) != (args.commit is None) or not (local or args.server):
        raise RequestError(
            "a figure without the server's version and commit says nothing: give --server and "
            "--commit, both"
        )
    named = {"name": args.machine} if args.machine is not None else machine()
    if args.server is not None:
        return named, {"server": args.server}, args.commit
    return named, {**software(), "server": f"winnow {__version__}"}, commit()


def _print_run(records: list[Any]) -> None:
    measured = [r for r in records if r.workload["phase"] == "measured"]
    load = measured[0].conditions
    users = load["concurrency"]
    print(f"{users} at once" if users is not None else f"{load['request_rate']} requests/s")
    for record in measured:
        spread = ""
        if len(record.samples) > 1:
            spread = f"  p90 {record.percentile(90):.2f}  of {len(record.samples)}"
        print(f"  {record.what:36} {record.median:10.2f} {record.unit}{spread}")


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values of `kind` between commas."""

    def read(words: str) -> list[Any]:
        return [kind(word) for word in words.split(",")]

    return read


def _run_id() -> str:
    import uuid

    return uuid.uuid4().hex[:12]
