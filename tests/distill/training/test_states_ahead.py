"""Hidden states of the next micro-batch are read on a stream of its own, and training is the same."""

from types import SimpleNamespace

import pytest
import torch
from workbench import Bench, final, options_of, same

from decode.errors import UserError
from decode.model.target import Target, TargetOutput
from distill import train as training
from distill.data import read_ahead
from distill.data.batches import MicroBatch
from distill.data.states_ahead import SideStream, StatesAhead
from distill.scoring.scorer import Scorer

CPU = torch.device("cpu")
END = 9
OPTIONS = {"trainer__precision": "32-true", "score__enabled": False}


class LateStream:
    """Its results hold the wrong numbers until they are waited for."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device, self.late, self.runs, self.used = device, [], 0, 0

    def run(self, work):
        self.runs += 1
        batch = work()
        own = (batch.tokens.clone(), *(x.clone() for x in batch.target_states))  # the items' stay right
        for tensor in own:
            self.late.append((tensor, tensor.clone()))
            tensor.fill_(-(10**6))
        return batch._replace(tokens=own[0], target_states=TargetOutput(*own[1:]))

    def join(self, *results):
        self.used = len(results)
        for tensor, value in self.late:
            tensor.copy_(value)
        self.late.clear()


class Items(torch.utils.data.Dataset):
    """Micro-batches of one number each; every third has its hidden states, from 1 on."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __len__(self) -> int:
        return END

    def __getitem__(self, index):
        self.made.append(index)
        tokens = torch.full((1, 2), index)
        batch = MicroBatch(tokens, torch.ones(1, 2, dtype=torch.bool), 1, index, 0, weight=torch.ones(1))
        return batch._replace(target_states=states(tokens)) if index % 3 == 1 else batch


def states(tokens, lengths=None) -> TargetOutput:
    return TargetOutput(tokens[..., None] * 10.0, tokens[..., None, None] * 100.0)


@pytest.fixture
def ahead():
    return StatesAhead(Items(), states, lambda index: (index // 4 + 1) * 4, CPU, LateStream())


def test_next_batch_is_under_way_while_one_is_used_but_not_that_of_the_next_phase(ahead):
    assert len(ahead) == END
    for index in range(END):
        batch = ahead[index]
        first = index % 4 == 0  # of a phase: read in the step itself
        assert ahead._items.made == list(range(index + 1 + (index % 4 < 3 and index + 1 < END)))
        assert batch.tokens.tolist() == [[index, index]]
        if not first or index % 3 == 1:
            assert batch.target_states.last.flatten().tolist() == [index * 10.0] * 2
            assert batch.target_states.taps.flatten().tolist() == [index * 100.0] * 2
        else:
            assert batch.target_states is None
        assert first or ahead._stream.used == 4, "tokens, weights, last and taps are kept"
        assert batch.loss_mask.all()
        assert batch.weight.tolist() == [1.0]


def test_reader_may_begin_anywhere(ahead):
    assert [ahead[i].tokens[0, 0].item() for i in (5, 6, 7, 2, 3)] == [5, 6, 7, 2, 3]
    assert ahead._items.made == [5, 6, 7, 2, 3]


def test_join_leaves_nothing_under_way(ahead):
    ahead[0]
    assert ahead._stream.late
    ahead.join()
    assert not ahead._stream.late
    assert ahead[1].tokens.tolist() == [[1, 1]]


# -- whole runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("ahead"))


@pytest.fixture
def streams(monkeypatch) -> list[LateStream]:
    """Runs on a CPU get late streams."""
    made: list[LateStream] = []

    def stream(device):
        made.append(LateStream(device))
        return made[-1]

    monkeypatch.setattr(training, "SideStream", stream)
    monkeypatch.setattr(training, "_check_ahead", lambda *_: None)
    return made


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("taps", ["online", "cache", "memory"])
@pytest.mark.ci("online-False", "cache-True", "memory-False")
def test_weights_and_losses_are_those_of_reading_in_the_step(
    bench, tmp_path, streams, logged, spy, taps, packing
):
    options = OPTIONS | {"taps": taps, "packing": packing, "trainer__accumulate_grad_batches": 2}
    reads = spy(Target, "read")
    bench.run(tmp_path / "plain", **options)
    in_steps = len(reads)
    threads = spy(read_ahead.ReadAhead, "__getitem__")
    bench.run(tmp_path / "ahead", taps_ahead=True, **options)
    (stream,) = streams
    assert stream.runs == 2 * 6 - 1
    assert bool(threads) == (taps == "cache"), "a thread reads the files"
    if taps != "cache":  # whose files the second run finds
        assert len(reads) == 2 * in_steps, "each micro-batch once"
    assert same(final(tmp_path / "plain"), final(tmp_path / "ahead"))
    assert logged(tmp_path / "plain", "train/loss") == logged(tmp_path / "ahead", "train/loss")


def test_scores_begin_when_nothing_is_under_way(bench, tmp_path, streams, monkeypatch):
    score, seen = Scorer.__call__, []

    def watched(self, *args, **options):
        seen.append(len(streams[0].late))
        return score(self, *args, **options)

    monkeypatch.setattr(Scorer, "__call__", watched)
    bench.run(tmp_path, taps="online", taps_ahead=True, score__every=2, score__prompts=1)
    assert len(seen) >= 3
    assert not any(seen)
    assert streams[0].runs == 5


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        ("cpu", {}, "reads on a GPU's second stream; set trainer=gpu"),
        ("cuda", {"target__placement": "sharded"}, "needs target.placement=replicated"),
        ("cuda", {"on_policy__share": 0.5}, "on_policy.share: the answers are made in the step"),
    ],
)
def test_runs_without_anything_to_read_ahead_are_refused(bench, device, options, said):
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    with pytest.raises(UserError, match=said):
        training._check_ahead(trainer, options_of(*bench.command, taps_ahead=True, **options))
    training._check_ahead(trainer, options_of(*bench.command, **options))


def test_refusal_comes_before_any_work(bench, tmp_path):
    bench.train("taps_ahead=true").refused("taps_ahead=true reads on a GPU's second stream")
    assert not bench.runs()


@pytest.mark.gpu
def test_batches_of_a_card_are_those_of_reading_in_the_step():
    device = torch.device("cuda")
    weight = torch.randn(512, 512, device=device)

    def read(tokens, lengths=None):
        last = weight[tokens % 512]
        for _ in range(50):  # long enough to be late
            last = torch.tanh(last @ weight)
        return TargetOutput(last, last[..., None, :])

    ahead = StatesAhead(Items(), read, lambda _: END, device, SideStream(device))
    for index in range(END):
        batch = ahead[index]
        if index:
            want = states if index % 3 == 1 else read
            expected = want(torch.full((1, 2), index, device=device))
            torch.testing.assert_close(batch.target_states.last, expected.last)
            torch.testing.assert_close(batch.target_states.taps, expected.taps)
