"""`rollout=vllm` with vLLM: two processes of a run share one, and it ends with the answers."""

import pytest
from engine_tests import MARK, own_engines
from workbench import ROOT, Ranks

from distill.rollouts.store import find

pytestmark = pytest.mark.engine
ENGINE = f'["--enforce-eager","--max-model-len=256","--max-num-seqs=8","{MARK}"]'


def test_two_ranks_train_on_the_answers_of_one_vllm(bench, vllm_python, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    given = [f"target={ROOT / 'data' / 'pocket'}", "rollout=vllm", f"rollout.engine_python={vllm_python}"]
    given += [
        f"rollout.engine_arguments={ENGINE}",
        "rollout.shard_size=3",
        "trainer=ddp",
        "trainer.devices=2",
    ]
    given += [f"output_dir={tmp_path}", "score.enabled=false", "trainer.max_steps=1", "score.every=1"]
    started = Ranks(2, [*bench.command, *given]).wait(600)
    assert [one.code for one in started] == [0, 0], started
    assert "shards made by each of 2 processes" in started[0].out
    store = find(None, str(tmp_path / "rollouts"))
    assert len(list(store.glob("shard-*.parquet"))) == 4
    assert len(list(store.glob("vllm-*.log"))) == 1
    assert not own_engines()
