"""foredraft generate: stream an answer to the terminal, with draft tokens in colour, and its speed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.generation.text import Detokenizer
from decode.generation.types import Output, Piece, Times
from decode.model.target import Target
from decode.plan import Plan
from decode.sampling import Sampler
from distill.commands import judged
from distill.config.build import TargetSource, quiet
from distill.options.commands import GenerateOptions
from distill.report.answer_picture import Part, answer_picture
from distill.scoring.scorer import threads
from distill.text_generation import Model, TextGenerator
from distill.utils import atomic_files
from distill.utils.progress import wants_color
from distill.utils.redact import printable
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.checkpoint.fastest_plan import Fastest
from drafters.registry import short_name

DRAFTED, PLAIN = "\x1b[32m", "\x1b[0m"
WARM_UP = 8  # tokens


def answer(options: GenerateOptions) -> float:
    """Print the answer to a prompt on stdout, and tau and speed on stderr; returns tau (0 without a drafter).

    With `svg`, the answer is drawn too. With `judge.script`, see `judged_answer`.

    Raises:
        UserError: the prompt is empty, not UTF-8 or too long, `checkpoint` has no drafter, or `svg` cannot be
            written.
    """
    quiet()
    if options.svg:
        check_svg(options)
    if options.judge.script:
        judged.check(options)
    color, prompt = wants_color(options.color), read_prompt(options.prompt)
    chats = options.prompts
    source = TargetSource(options.target)
    chat = source.chat(chats.template, chats.template_options, chats.moment)
    plan = options.decode if options.checkpoint else Plan()
    if not isinstance(plan, Plan | Fastest):
        raise UserError(
            "decode=auto and decode=calibrated choose a plan when a checkpoint is scored and record it in "
            "score.json; decode=fastest reads it there"
        )
    target = source.load(chat=chat)
    model = Model(target, chat)
    drafter, remark = None, ""
    if options.checkpoint:
        drafter = checkpoint_io.load(checkpoint_io.fetch(options.checkpoint), target)
        if isinstance(plan, Fastest):
            plan, remark = fastest_plan(plan, drafter, target, options.sampling)
    assert isinstance(plan, Plan)
    ids = model.encode(prompt)
    stop = [str(s).replace("\\n", "\n") for s in options.stop]
    drafting = TextGenerator(
        model, drafter, plan, options.sampling, options.max_new_tokens, stop, options.seed
    )
    if options.judge.script:
        with threads(options.threads):
            return judged.judged_answer(options, drafting, ids)
    verifier = drafting.tapped_target()
    # With a tuned target, plain decoding uses the tuned target too.
    plain_generator = replace(drafting, model=Model(verifier, chat), drafter=None)
    compare_plain = drafter is not None and options.plain and plan.depth > 0
    with threads(options.threads):
        for generator in [drafting, plain_generator] if compare_plain else [drafting]:  # warm-up
            replace(generator, max_new_tokens=min(WARM_UP, options.max_new_tokens)).generate([ids])
        last, parts = show(drafting.stream(ids), chat.tokenizer, color)
        line = summary(drafting.resolved_plan, last.output, last.times)
        if compare_plain:
            plain = plain_generator.generate([ids])
            line += plain_comparison(speed(last.output, last.times), speed(plain.outputs[0], plain.times))
    line += remark
    line += "; lossless to the tuned target" if drafter is not None and drafter.traits.tunes_target else ""
    print(line, file=sys.stderr, flush=True)
    if options.svg:
        assert drafter is not None, "check_svg asks for a checkpoint"
        picture = answer_picture(printable(prompt), parts, short_name(drafter), last.output.tau)
        atomic_files.put(Path(options.svg), picture)
        print(f"written: {options.svg}", file=sys.stderr)
    return last.output.tau


def fastest_plan(choice: Fastest, drafter: Drafter, target: Target, sampler: Sampler) -> tuple[Plan, str]:
    """The plan of the checkpoint's score for a single prompt, and a remark for the summary."""
    plan, reason = choice.choose(drafter, target, sampler, batch=1)
    if reason:
        return plan, f"; a default plan: {reason}"
    return plan, "" if plan.depth else "; no draft of its score is faster here; decode=dynamic drafts"


def check_svg(options: GenerateOptions) -> None:
    """Check the options of `svg`, a file for a picture of the answer.

    Raises:
        UserError: no checkpoint, a judge is set, or there is no such folder.
    """
    assert options.svg is not None
    if not options.checkpoint:
        raise UserError("svg: shows accepted draft tokens; give checkpoint=<a run's checkpoints/best>")
    if options.judge.script:
        raise UserError("svg: a judge accepts steps, not tokens; leave judge.script=null")
    path = Path(options.svg)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"svg: {path} is no file in a folder that exists; give a path as in svg=answer.svg")


def read_prompt(prompt: str) -> str:
    """Return the prompt; read it from stdin if it is `-`.

    Raises:
        UserError: the prompt is empty or not UTF-8.
    """
    try:
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else str(prompt)
        text.encode()
    except UnicodeError:
        raise UserError("prompt: not UTF-8") from None
    if not text.strip():
        raise UserError("prompt: it is empty; give some text, or prompt=- to read it from stdin")
    return text


def show(
    pieces: Iterable[Piece], tokenizer: PreTrainedTokenizerBase, color: bool
) -> tuple[Piece, list[Part]]:
    """Print a stream of text as it is generated; returns the last piece, and the text of each token.

    A character of several tokens has the colour of its last token. Control characters are escaped.
    """
    text, piece, parts = Detokenizer(tokenizer, skip_special_tokens=True), None, []
    if color:
        print(f"{DRAFTED}accepted draft tokens{PLAIN}, the target's own tokens\n")
    for piece in pieces:
        for token, drafted in zip(piece.tokens, piece.drafted, strict=True):
            part = printable(text.add(token))
            parts.append(Part(part, drafted))
            print(f"{DRAFTED}{part}{PLAIN}" if color and drafted and part else part, end="")
        sys.stdout.flush()
    rest = printable(text.end())
    parts.append(Part(rest, drafted=False))
    print(rest, flush=True)
    assert piece is not None, "a stream has at least the prefill's token"
    return piece, [part for part in parts if part.text]


def speed(output: Output, times: Times) -> float:
    """Tokens per second, excluding the prefill and its token, as in scorecards."""
    return sum(output.emitted) / times.total if times.total else 0.0


def summary(plan: Plan, output: Output, times: Times) -> str:
    """Format plan, number of tokens, tau and speed as one line."""
    tau = f"tau {output.tau:.2f}, " if plan.depth else ""
    count = len(output.tokens)
    return f"{plan.name}: {count} token{'s' * (count > 1)}, {tau}{speed(output, times):.0f} tokens/s"


def plain_comparison(speculative: float, plain: float) -> str:
    """Format the speed of plain decoding and the speedup over it."""
    return f"; plain {plain:.0f} tokens/s ({speculative / plain:.2f}x)" if plain else ""
