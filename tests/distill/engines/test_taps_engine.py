"""With `taps=engine`, hidden states are read from files of a server; wrong files are noticed."""

import os
import signal
import time
from dataclasses import replace

import datasets
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from states_server import StatesServer
from workbench import Bench, make_target, make_tokenizer, options_of

from decode.errors import UserError
from decode.model.load import load_target
from decode.model.target import LAST
from distill.config.build import TargetSource
from distill.config.engine import check_engine
from distill.data import taps_disk
from distill.data.taps_disk import TapCache
from distill.engines import http
from distill.engines.engine_target import load_engine_target
from distill.engines.unnamed_files import KEPT, UnnamedFiles
from distill.prompts.chat_template import Chat

LAYERS = (0, 1, 2)  # the last stands for the output of the last


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def whole(folder):
    return load_target(str(folder), "float32")


@pytest.fixture
def server(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.01)
    (tmp_path / "states").mkdir()
    started = StatesServer(Chat(make_tokenizer()), whole, tmp_path / "states", LAYERS)
    yield started
    started.kill()


@pytest.fixture
def engine(server, folder, tmp_path):
    """The target in the server."""
    settings = [f"target={folder}", "target.dtype=float32", "taps=engine", "score.enabled=false"]
    settings += [f"engine.url={server.url}", f"engine.folder={tmp_path / 'states'}", "engine.model=m"]
    options = options_of(*settings, "engine.patience=3", "engine.retries=1", engine__layers=list(LAYERS))
    target = load_engine_target(options.engine, options.target, torch.device("cpu"), tmp_path / "run", 1.0)
    target.tap((1, LAST, 0))
    return target


def texts(*lengths: int) -> list[list[int]]:
    return [[(7 * i + 3 * n) % 200 for i in range(n)] for n in lengths]


def rows(*lengths: int) -> datasets.Dataset:
    """Rows whose answers have all but two tokens."""
    masks = [[0, 0] + [1] * (n - 2) for n in lengths]
    return datasets.Dataset.from_dict({"tokens": texts(*lengths), "loss_mask": masks})


def read(engine, *lengths: int):
    return engine.read(torch.tensor(texts(*lengths)))


def cached(target, data, folder, gb: float = 1.0) -> TapCache:
    return TapCache(target, data, 12, folder, "store", gb, packing=True)


def close(actual, expected, atol: float = 1e-4, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_read_is_what_the_target_computes_in_the_order_of_the_taps(engine, whole):
    whole.tap(engine.taps)
    tokens = torch.zeros(3, 9, dtype=torch.long)
    for i, text in enumerate(texts(9, 4, 7)):
        tokens[i, : len(text)] = torch.tensor(text)
    for lengths in ([9, 4, 7], None):
        states, want = engine.read(tokens, lengths), whole.read(tokens, lengths)
        close(states.last, want.last)
        close(states.taps, want.taps)
    assert not list(engine._connection[1].folder.iterdir()), "files are removed once they are read"


def test_text_as_long_as_the_context_is_read_up_to_its_last_token(engine, server, whole):
    (text,) = texts(whole.max_positions)
    last = engine.read(torch.tensor([text])).last[0]
    assert len(server.read[-1]) == len(text) - 1
    close(last[:-1], whole.read(torch.tensor([text])).last[0, :-1], atol=1e-3, rtol=1e-3)
    assert not last[-1].any()


def other_tokens(file):
    return file | {"token_ids": file["token_ids"] + 1}


def half(file):
    return file | {"hidden_states": file["hidden_states"][:-1].clone()}


@pytest.mark.parametrize("damage", [other_tokens, half, lambda file: {"token_ids": file["token_ids"]}])
def test_damaged_file_is_asked_for_again(engine, server, whole, damage):
    read(engine, 5)
    server.damage = [damage]
    whole.tap(engine.taps)
    tokens = torch.tensor(texts(6))
    close(engine.read(tokens).taps, whole.read(tokens).taps)
    server.damage = [damage] * 2
    with pytest.raises(UserError, match=r"given up after 2 attempts \(engine.retries=1\)"):
        engine.read(tokens)


def test_engine_of_another_target_is_refused(engine, server, tmp_path, monkeypatch):
    monkeypatch.setattr("distill.engines.hidden_states.WRITES", 0.05)
    for changes, said in (
        ({"layers": (0, 2)}, r"\(2, 32\).*not \(3, 32\).*eagle_aux_hidden_state_layer_ids"),
        ({"layers": (2, 1, 0)}, "nats off the engine's own"),  # the head reads another layer
        ({"layers": LAYERS, "folder": tmp_path}, r"engine.folder=.*not there"),
        ({"writes": False}, "writes no hidden states; start it with --speculative-config"),
    ):
        vars(server).update(changes)
        with pytest.raises(UserError, match=said):
            read(engine, 5)
    server.kill()
    with pytest.raises(UserError, match="no server answers there"):
        read(engine, 5)
    with pytest.raises(UserError, match=r"lacks \[7\]|is no layer"):
        engine.tap((7,))


def test_killed_engine_loses_nothing_that_was_read(engine, server, whole, tmp_path, monkeypatch, capsys):
    """Rows that had been read stay; the others, and no others, are asked for when it is back."""
    monkeypatch.setattr("distill.data.taps_memory.TOKENS", 16)
    monkeypatch.setattr(type(engine), "read_ahead", 0)
    data = rows(8, 12, 6, 9, 14, 5, 11)
    read(engine, 5)
    server.read.clear()
    server.left, server.faults = 4, []
    with pytest.raises(UserError, match="the same command continues from there"):
        cached(engine, data, tmp_path)
    (partial,) = tmp_path.glob("taps-*/*.part")
    server.left = 10**9
    asked = len(server.read)
    cache = cached(engine, data, tmp_path)
    assert "continuing after 4 of 7 rows" in capsys.readouterr().out
    assert len(server.read) - asked == 3
    assert not partial.exists()
    whole.tap(engine.taps)
    want = cached(whole, data, tmp_path / "own")
    for row in range(7):
        mine, theirs = cache.batch([row]), want.batch([row])
        close(mine.taps, theirs.taps, atol=0.02, rtol=0.01)
        close(mine.last, theirs.last, atol=0.02, rtol=0.01)


def test_texts_read_with_one_that_failed_are_kept(engine, server):
    read(engine, 5)
    server.read.clear()
    server.left = 2
    tokens = torch.tensor([[i, 7, 9, 11] for i in range(4)])
    with pytest.raises(UserError, match=r"given up after"):
        engine.read(tokens)
    server.left = 10**9
    done = len(list(server.folder.glob(KEPT.format("*"))))
    server.read.clear()
    engine.read(tokens)
    assert (done, len(server.read)) == (2, 2)
    assert not list(server.folder.glob(KEPT.format("*")))


def test_damaged_cache_is_noticed_and_read_again(engine, server, tmp_path, monkeypatch):
    monkeypatch.setattr(taps_disk, "FILE_BYTES", 1)  # a file for every row
    data = rows(8, 12, 6, 9)
    read(engine, 5)
    cache = cached(engine, data, tmp_path)
    third = sorted(cache.folder.glob("*.safetensors"))[2]
    content = bytearray(third.read_bytes())
    content[-9] ^= 1  # the last of the vectors: the row's checksum stands behind them
    third.write_bytes(content)
    cache = cached(engine, data, tmp_path)
    with pytest.raises(UserError, match="changed since it was made; delete it"):
        cache.batch([2])
    third.unlink()
    server.read.clear()
    cached(engine, data, tmp_path)
    assert list(map(len, server.read)) == [5], "the damaged one"
    server.read.clear()
    cached(engine, data, tmp_path)
    assert not server.read


def test_cache_of_an_engine_is_bounded_and_none_of_the_targets_own(engine, whole, tmp_path):
    data = rows(8, 12)
    assert cached(engine, data, tmp_path, 1e-9).count == 0
    whole.tap(engine.taps)
    own = cached(whole, data, tmp_path)
    assert cached(engine, data, tmp_path).folder != own.folder


def train(bench: Bench, server: StatesServer, *more: str):
    """A run whose target is in the server, which has the name that the target's folder has."""
    server.models = (str(bench.target),)
    settings = ["taps=engine", "score.enabled=false", "engine.layers=[2]", "engine.patience=0", "seed=1"]
    place = [f"engine.url={server.url}", f"engine.folder={server.folder}"]
    return bench.train(*settings, *place, "target.dtype=float32", *more)


def test_run_reads_each_answer_as_it_is_written(tmp_path, server):
    """Answers, hidden states and teacher rows in one pass: no text is read a second time."""
    bench = Bench(tmp_path)
    server.target, server.layers = load_target(str(bench.target), "float32"), (2,)
    out = train(bench, server, "rollout.until=answer").succeeded()
    num_probes, num_checked = 4, 12  # of the connection; rows whose surprisal is looked at
    assert len(server.read) == num_probes + num_checked
    assert not list(server.folder.iterdir())
    (cache,) = (tmp_path / "outputs" / "rollouts").glob("*/taps-*")
    with safe_open(cache / "taps-00000.safetensors", "pt") as file:
        assert file.get_slice("taps").get_shape()[1:] == [1, 32]
    assert (out.folder / "checkpoints" / "6" / "model.safetensors").is_file()
    server.read.clear()
    again = train(bench, server, "rollout.until=answer", "batch_size=3").succeeded()
    assert "reusing" in again.out
    assert not server.read, "what is on the disk needs no engine"


@pytest.mark.parametrize("limit", [1.0, 8e-6, 0.0], ids=["all kept", "some", "none"])
@pytest.mark.ci("some")
def test_drafter_is_trained_as_where_the_target_is_loaded(tmp_path, server, monkeypatch, limit):
    """Where not all hidden states may be kept, the engine reads the others while the drafter trains."""

    load = TargetSource.load

    def drawing(*given, **options):
        torch.rand(7)  # as where the speed of its products is measured
        return load(*given, **options)

    monkeypatch.setattr(TargetSource, "load", drawing)
    bench = Bench(tmp_path)
    server.target, server.layers = load_target(str(bench.target), "float32"), (2,)
    here = ["taps=cache", "score.enabled=false", "seed=1", "target.dtype=float32", "rollout.until=answer"]
    monkeypatch.setattr(taps_disk, "FILE_BYTES", 4096)
    here, there = ([*settings, f"taps_gb={limit}"] for settings in (here, ["rollout.until=answer"]))
    runs = [bench.train(*here).succeeded(), train(bench, server, *there).succeeded()]
    assert "reusing" in runs[1].out
    assert (f"rows are kept (taps_gb={limit:g}); the target reads" in runs[1].out) == (limit < 1)
    assert bool(list(bench.root.glob("outputs/rollouts/*/taps-*/*.safetensors"))) == (limit > 0)
    own, other = (load_file(run.folder / "checkpoints" / "6" / "model.safetensors") for run in runs)
    assert own.keys() == other.keys()
    for name, weight in own.items():
        assert float((weight - other[name]).norm()) < 1e-2 * float(weight.norm()), name


def test_answers_are_kept_within_the_limit(engine, server):
    _, client = engine._connected()
    client.limit = 4000
    asked = {"max_tokens": 1, "logprobs": 1, "return_token_ids": True}
    for length in (8, 9, 10):
        said = server.reply(asked | {"prompt": texts(length)[0]})
        client.keep(said["kv_transfer_params"]["hidden_states_path"])
    kept = list(client.folder.glob(KEPT.format("*")))
    assert len(kept) == 1
    assert kept == list(client.folder.iterdir())
    server.read.clear()
    read(engine, 8)
    assert not server.read
    assert client.size == 0


def test_files_of_requests_that_timed_out_are_removed_and_counted(engine, server, tmp_path, capsys):
    """The engine writes them after nobody waits for them; what others put there stays."""
    (server.folder / "other.safetensors").write_text("")
    _, client = engine._connected()
    client.server = replace(client.server, timeout=0.3)
    reply, slow = server.reply, iter([True] * 3)

    def late(body):
        time.sleep(0.6 if next(slow, False) else 0)
        return reply(body)

    server.reply = late
    read(engine, 7, 7, 7)
    engine.rest()
    assert [path.name for path in server.folder.iterdir()] == ["other.safetensors"]
    assert "3 files of hidden states that no answer named were removed" in capsys.readouterr().out


def test_unnamed_files_count_where_another_process_asks_too(engine, server):
    _, client = engine._connected()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        other = UnnamedFiles(server.folder)
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(bool(other))
    try:
        os.read(reader, 1)
        with client.asking(client.retry):
            (server.folder / "late.safetensors").write_bytes(bytes(500))
        assert client.unnamed.size == 500
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with client.asking(client.retry):
        pass
    assert client.unnamed.size == 0
    assert not list(server.folder.iterdir())


def spoil(server, change) -> None:
    """Let `change` alter every reply."""
    reply = server.reply

    def changed(body):
        said = reply(body)
        change(said)
        return said

    server.reply = changed


@pytest.mark.parametrize("path", ["..", "/a/..", "", "/", "a\0b", "x" * 5000, "\ud800", 7, ["a"]])
def test_path_that_is_no_file_is_one_line(engine, server, path):
    _, client = engine._connected()
    spoil(server, lambda said: said.update(kv_transfer_params={"hidden_states_path": path}))
    with pytest.raises(UserError, match=r"is no file of hidden states|writes no hidden states") as error:
        read(engine, 5)
    assert str(error.value).isprintable()
    if isinstance(path, str):
        with pytest.raises(UserError, match="is no file of hidden states"):
            client.keep(path)


@pytest.mark.parametrize("token", [-1, 10**9, "x", None, 1.5])
def test_malformed_token_is_one_line(engine, server, token):
    engine._connected()
    spoil(server, lambda said: said["choices"][0].update(token_ids=[token]))
    with pytest.raises(UserError, match=r"makes no sense|the engine sent token"):
        read(engine, 5)


def test_options_that_an_engine_excludes_are_refused():
    for settings, said in (
        ([], "engine.python, an interpreter that has vLLM, or engine.url"),
        (["engine.url=http://a/v1"], "engine.folder=None: give the folder"),
        (["engine.python=p", "score.enabled=true"], "score.enabled=true: checkpoints are scored by decoding"),
        (["engine.python=p", "on_policy.share=0.5"], "on_policy.share"),
        (["engine.python=p", "target.compile=true"], "target.compile"),
        (["engine.python=p", "rollout=ray"], "rollout=ray: which loads it again"),
        (["engine.python=p", "rollout=vllm"], "rollout=vllm: which loads it again"),
        (["engine.python=p", "trainer=ddp", "trainer.devices=2"], "every process would start an engine"),
        (["engine.python=p", "taps=cache"], "need taps=engine"),
    ):
        with pytest.raises(UserError, match=said):
            check_engine(options_of("taps=engine", "score.enabled=false", *settings))


def test_refusals_come_before_any_work(tmp_path, server):
    bench = Bench(tmp_path)
    nowhere = ("taps=engine", "engine.python=/nowhere/python", "score.enabled=false")
    bench.train(*nowhere).refused("no interpreter")
    bench.train("taps=engine", "engine.url=http://user:key@a/v1").refused("contains a secret")
    assert not (tmp_path / "outputs").exists() or not bench.runs()
    for name in ("medusa2", "prompt"):  # which need the layers
        train(bench, server, f"drafter={name}").refused("target")
