"""Captured decoding beside uncaptured decoding."""

from workbench import enlarge

from decode.generation.generate import generate
from decode.plan import Plan
from decode.sampling import Sampler

VOCAB = 24
PROMPTS = [[5, 9, 2, 7, 3, 5, 9, 2], [4, 6, 10], [17, 4, 21, 6, 12, 17, 4], [1, 2], [9] * 12]
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
CHAIN, DYNAMIC, SAMPLED = Plan(3), Plan(3, 3, 7), Plan(3, proposal="sampled", rule="token")
STATIC = Plan(tree=TREE, proposal="sampled", rule="recursive")


def make_heedful(tiny_target):
    """A small target that heeds every token: a wrong mask changes what is accepted."""
    target = tiny_target(vocab=VOCAB, layers=3, hidden=16, positions=512)
    enlarge(target.model, 8.0)
    return target


def decoded(target, drafter, plan, temperature, capture, size=None, length=24, prompts=PROMPTS, **options):
    """Texts, and accepted tokens and draft lengths of every round."""
    target.capture = capture
    sampler = Sampler(temperature, **options.pop("warp", {}))
    options |= {"sampler": sampler, "plan": plan, "max_new_tokens": length, "batch_size": size, "stop": (3,)}
    outputs = generate(target, drafter, prompts, **options).outputs
    return [(o.tokens, o.accepted, o.draft_lengths, o.drafted) for o in outputs]


def assert_same(target, drafter, plan, temperature, **options):
    """Compare for one row at a time, and for three, which others join."""
    for size in (1, 3):
        plain = decoded(target, drafter, plan, temperature, False, size, **options)
        captured = decoded(target, drafter, plan, temperature, True, size, **options)
        assert captured == plain, (plan, temperature, size)
