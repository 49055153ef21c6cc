"""foredraft generate judge.script=...: a judge decides which steps of the draft model stay."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from decode.errors import UserError
from decode.generation.text import StopStrings
from decode.lossy.reward_guided import JudgedOutput, generate_judged
from decode.model.load import stop_tokens
from decode.model.target import Target
from distill.options.commands import GenerateOptions
from distill.scoring.script_judge import ScriptJudge
from distill.text_generation import TextGenerator
from distill.utils.redact import printable
from drafters import optional
from drafters.base import Drafter


def check(options: GenerateOptions) -> None:
    """Check the options of `judge.script`.

    Raises:
        UserError: no checkpoint, no such script, or stop strings are set.
    """
    _script(options)
    if not options.checkpoint:
        raise UserError("judge.script: needs a draft model; give checkpoint=<a checkpoint of drafter=lm>")
    if options.stop:
        raise UserError("judge.script: stop strings end steps here; leave stop=[] and set judge.step")


def judged_answer(options: GenerateOptions, drafting: TextGenerator, ids: Sequence[int]) -> float:
    """Print an answer and its speed; returns the share of steps written by the draft model.

    Raises:
        UserError: the drafter cannot generate text without the target, or the script fails.
    """
    target, tokenizer = drafting.tapped_target(), drafting.model.chat.tokenizer
    drafter = drafting.drafter
    assert drafter is not None
    draft = _writer(drafter, target)
    ends = StopStrings(tokenizer, options.judge.step.replace("\\n", "\n"))

    def text(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    with _script(options) as script:

        def judge(request: int, answer: Sequence[int], step: Sequence[int]) -> float:
            del request
            return script({"prompt": options.prompt, "answer": text(answer), "step": text(step)})

        begin = time.perf_counter()
        found = generate_judged(
            target,
            draft,
            [ids],
            judge,
            options.judge.least,
            ends,
            max_new_tokens=options.max_new_tokens,
            sampler=options.sampling,
            stop=stop_tokens(target),
            seed=options.seed,
        )
        seconds = time.perf_counter() - begin
    (output,) = found.outputs
    print(printable(text(output.tokens)), flush=True)
    line, speed = _summary(output, seconds), len(output.tokens) / seconds
    if options.plain:
        begin = time.perf_counter()
        plain = replace(drafting, drafter=None).generate([ids]).outputs[0].tokens
        plain_speed = len(plain) / (time.perf_counter() - begin)
        line += f"; plain {plain_speed:.0f} tokens/s ({speed / plain_speed:.2f}x)"
    print(f"{line}; LOSSY", file=sys.stderr, flush=True)
    return sum(step.drafted for step in output.steps) / len(output.steps)


def _script(options: GenerateOptions) -> ScriptJudge:
    return ScriptJudge(str(options.judge.script), "judge.script", "judge.timeout", options.judge.timeout)


def _writer(drafter: Drafter, target: Target) -> Target:
    """Return the drafter as a standalone model.

    Raises:
        UserError: the drafter is no standalone model.
    """
    try:
        return optional.as_target(drafter, target)
    except UserError:
        raise UserError(
            "judge.script: this drafter writes no steps without the target; give a checkpoint of drafter=lm"
        ) from None


def _summary(output: JudgedOutput, seconds: float) -> str:
    """Format steps, tokens and speed as one line; the time includes the judge."""
    kept = sum(step.drafted for step in output.steps)
    count, tokens = len(output.steps), len(output.tokens)
    return f"{kept} of {count} steps are the draft model's, {tokens} tokens, {tokens / seconds:.0f} tokens/s"
