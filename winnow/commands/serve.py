"""`winnow serve`: its options, and the one call that they make."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from winnow.commands.engine_options import (
    add_engine_options,
    add_model,
    build_options,
    engine_config,
)
from winnow.commands.parsing import at_least, command, number
from winnow.errors import UnsupportedError

KEY_VARIABLE = "WINNOW_API_KEY"


def add_serve(commands: Any) -> None:
    """Register the command."""
    # Its log, on stderr, is all it says.
    parser = command(commands, "serve", _run, "serve a model over OpenAI's HTTP API", prints=False)
    add_model(parser)
    _http_options(parser.add_argument_group("http"))
    _limit_options(parser.add_argument_group("limits"))
    add_engine_options(parser.add_argument_group("engine"))


def _http_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    ports = number(int, lambda n: 0 <= n <= 65535, "a port from 0 to 65535")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every one of IPv4")
    add("--port", type=ports, default=8000, metavar="N", help="port; 0 takes a free one")
    add("--served-model-name", metavar="NAME", help="what clients call it; default: MODEL's name")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"one that opens the API, beside {KEY_VARIABLE}; may be given again",
    )
    add("--api-key-file", metavar="F", help="file with such keys, one a line")
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web origin whose pages may call; * is any; may be given again",
    )
    add("--log-prompts", action="store_true", help="write prompts to the log")


def _limit_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    seconds = number(float, lambda x: 0 < x <= 1e6, "a number of seconds above 0")
    count, some = at_least(1), at_least(0)
    add("--max-queue", type=some, default=256, metavar="N", help="answers that may wait")
    add("--max-n", type=count, default=16, metavar="N", help="answers to one prompt")
    add(
        "--default-max-tokens",
        type=count,
        default=4096,
        metavar="N",
        help="tokens of an answer whose request gives no limit",
    )
    add("--max-body-bytes", type=count, default=2**24, metavar="N", help="bytes of one request")
    for name, default, text in (
        ("--request-timeout", 600.0, "one request may take"),
        ("--drain-timeout", 30.0, "running requests get after SIGTERM"),
        ("--send-timeout", 30.0, "a client may leave its answer unread"),
    ):
        add(name, type=seconds, default=default, metavar="S", help=f"seconds that {text}")


def _run(args: argparse.Namespace) -> int:
    from winnow.server.run import serve
    from winnow.server.settings import ServerConfig

    config = ServerConfig(
        host=args.host,
        port=args.port,
        model_name=args.served_model_name or "",
        api_keys=_keys(args),
        allow_origins=tuple(args.allow_origin),
        max_queue=args.max_queue,
        max_n=args.max_n,
        default_max_tokens=args.default_max_tokens,
        max_body_bytes=args.max_body_bytes,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        send_timeout_s=args.send_timeout,
        log_prompts=args.log_prompts,
    )
    if args.device == "cpu":
        _leave_a_core()
    # A server's log is its only voice: it says what it does without being asked.
    logger = logging.getLogger("winnow")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        return serve(args.model, engine_config(args), config, **build_options(args))
    finally:
        logger.setLevel(level)


def _leave_a_core() -> None:
    """Have the engine compute on all cores but one, which HTTP gets.

    Threads of a step wait for each other, in loops: on cores that HTTP shares, a step takes as long
    as the thread that was pushed aside. OpenMP reads the variable in the engine's process; a value
    of the user's own stays.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) - 1)))


def _keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Of the words, the environment and the file; never shown again."""
    keys = list(args.api_key)
    if KEY_VARIABLE in os.environ:
        if not os.environ[KEY_VARIABLE]:
            # Started open because a variable came out empty: the mistake nobody would notice.
            raise UnsupportedError(
                f"{KEY_VARIABLE} is set and empty: put a key in it, or unset it to do without"
            )
        keys.append(os.environ[KEY_VARIABLE])
    if args.api_key_file is not None:
        try:
            lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UnsupportedError(f"cannot read API keys: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            # Started open because a file was empty: the mistake nobody would notice.
            raise UnsupportedError(f"{args.api_key_file} has no API key: put one on a line")
        keys += found
    return tuple(keys)
