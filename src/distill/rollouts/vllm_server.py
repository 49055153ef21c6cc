"""`rollout=vllm`: the processes of a run share one vLLM on each machine, which the first of them starts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from decode.errors import UserError
from decode.model.target import Target
from distill.config.engine import OPTION, check_started
from distill.distributed.ranks import gather
from distill.engines.engine_target import GONE
from distill.engines.gpus import spread, visible_gpus
from distill.engines.http import Server
from distill.engines.openai import OpenAIEngine
from distill.engines.vllm import SERVER, VLLM
from distill.options.answers import AnswerOptions, VLLMRolloutOptions
from distill.prompts.chat_template import Chat
from distill.rollouts.store import RolloutStore
from distill.rollouts.writer import Writer
from distill.utils.progress import rank_and_world, say

NO_KEY = "FOREDRAFT_NO_KEY"  # engines that a run starts need no key
Started = tuple[str, int]  # url and copies of the target; the text of an error and 0


def check_vllm(options: AnswerOptions) -> VLLM | None:
    """The installation that `rollout=vllm` names; None with another `rollout`.

    Raises:
        UserError: no interpreter, or one without vLLM.
    """
    rollout = options.rollout
    if rollout.engine != "vllm":
        return None
    check_started(rollout)
    assert isinstance(rollout, VLLMRolloutOptions)
    assert rollout.engine_python
    return VLLM(rollout.engine_python, rollout.engine_arguments, rollout.engine_patience, OPTION)


def fill_with_vllm(
    options: AnswerOptions, target: Target, chat: Chat, store: RolloutStore, done: Callable[[int], None]
) -> None:
    """Fill a store with the answers of a vLLM on each machine; every process of the run calls this.

    Args:
        options: options of the engine.
        target: model that vLLM loads too.
        chat: renders prompts.
        store: an opened store.
        done: see `RolloutStore.fill`.

    Raises:
        UserError: vLLM does not start, the target does not fit, or the server fails.
    """
    with _shared_server(options, target, store) as server:
        engine = OpenAIEngine(server, chat, store.plan.seed, target.max_positions)
        store.fill(Writer(engine, chat, store.plan), done, pause=target.idle)


@contextmanager
def _shared_server(options: AnswerOptions, target: Target, store: RolloutStore) -> Iterator[Server]:
    """Start vLLM in the first process of each machine; yields the connection to this machine's."""
    rollout, name = options.rollout, options.target.name
    assert isinstance(rollout, VLLMRolloutOptions)  # by `check_vllm`
    hosts = gather(socket.gethostname())
    if len(hosts) == 1 and (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0") != "0":
        raise UserError("rollout=vllm: vLLM takes all GPUs; start one process of this command on a machine")
    rank = rank_and_world()[0] if len(hosts) > 1 else 0
    here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    waiting = time.perf_counter()
    with ExitStack() as running:  # errors in this block include the engine's output
        started: Started = "", 0
        if rank == here[0]:
            try:
                started = _start(options, target, store, running)
            except UserError as error:  # told to the others, which would wait
                started = str(error), 0
        every = gather(started)
        if failed := next((text for text, copies in every if text and not copies), None):
            raise UserError(failed)
        url, copies = every[here[0]]
        target.starting_seconds += time.perf_counter() - waiting
        flights = max(1, store.plan.batch_size * copies // len(here))
        limits = rollout.engine_timeout, rollout.engine_retries, GONE
        yield Server(f"{url}/v1", name, flights, *limits, NO_KEY, "rollout.engine_")


def _start(options: AnswerOptions, target: Target, store: RolloutStore, running: ExitStack) -> Started:
    engine = check_vllm(options)
    assert engine
    heads = target.model.config.get_text_config().num_attention_heads
    gpus = visible_gpus(engine.python)
    sizes, copies = spread(gpus, target.bytes, heads, engine.arguments)
    log = Path(store.cache) / f"vllm-{socket.gethostname()}.log"
    where = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}" if gpus else "the CPU"
    say(f"rollouts: starting {SERVER} on {where} {' '.join(sizes)}".rstrip() + f"; its output is in {log}")
    server = running.enter_context(engine.serve_target(options.target, options.target.name, log, *sizes))
    return server.url, copies
