"""Check `taps=engine` and `rollout=vllm` before any work starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from decode.errors import UserError
from distill.config.validate import processes

if TYPE_CHECKING:
    from distill.options.run import RunOptions

OPTION = "rollout.engine_python"


def check_started(rollout: Any) -> None:
    """Check that `rollout=vllm` names an interpreter.

    Args:
        rollout: its options, or their part of a configuration.

    Raises:
        UserError: it does not.
    """
    if rollout.engine != "vllm":
        return
    if not hasattr(rollout, "engine_python"):
        raise UserError("rollout.engine=vllm: choose it with rollout=vllm, which has its settings")
    if not rollout.engine_python:
        raise UserError(
            f"rollout=vllm: give {OPTION} or FOREDRAFT_VLLM_PYTHON, an interpreter that has vLLM: python -m "
            f"venv vllm && vllm/bin/pip install vllm, then {OPTION}=vllm/bin/python"
        )


def check_engine(options: RunOptions | Any) -> None:
    """Check the requirements and exclusions of `taps=engine`.

    Args:
        options: of a run, or their configuration, before the slow imports of a run.

    Raises:
        UserError: names the first incompatible option.
    """
    engine, trainer = options.engine, options.trainer
    if options.taps != "engine":
        if engine.url or engine.python:
            raise UserError("engine.url and engine.python: they need taps=engine; set it, or remove them")
        return
    if bool(engine.url) == bool(engine.python):
        raise UserError(
            "taps=engine: give engine.python, an interpreter that has vLLM, or engine.url and engine.folder "
            "of an engine that runs"
        )
    if engine.url and not (engine.folder and Path(engine.folder).is_dir()):
        raise UserError(
            f"engine.folder={engine.folder}: give the folder that the engine writes hidden states to"
        )
    if options.score.enabled:
        _refuse(
            "score.enabled=true: checkpoints are scored by decoding with the target", "score.enabled=false"
        )
    if options.on_policy.share:
        _refuse("on_policy.share: the target would read new texts in every step", "on_policy.share=0")
    if options.target.placement != "replicated" or options.target.compile:
        _refuse("target.placement and target.compile are of a target in this process", "leave them")
    if (kind := options.rollout.engine) in ("ray", "vllm"):
        _refuse(f"rollout={kind}: which loads it again", "rollout=hf, where the engine answers")
    if engine.python and processes(trainer.accelerator, trainer.devices, trainer.num_nodes) > 1:
        _refuse("engine.python: every process would start an engine", "start one, and give engine.url")


def _refuse(what: str, instead: str) -> NoReturn:
    raise UserError(f"taps=engine: the target is only in the engine, not with {what}; {instead}")
