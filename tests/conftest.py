"""Fixtures: random-weight models on one CPU thread, and the bundled pocket target."""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import hypothesis
import pytest
import torch
from ci_cases import mark_proofs, mark_tiers
from drafter_checks import both, random_rollouts
from fake_hub import FakeHub
from hydra import compose
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.utils import instantiate
from omegaconf import OmegaConf
from stores import PLAN, make_writer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from workbench import ROOT, Bench, make_target, write_prompts

from decode.model.head import Head
from decode.model.load import load_target, load_tokenizer
from decode.model.target import LAST, Target
from distill.config.choices import options
from distill.config.compose import configurations
from distill.config.read import OF_ANY
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt
from distill.prompts.sources import read_prompts
from distill.rollouts.writer import Writer
from drafters.base import Drafter
from drafters.checkpoint import io as checkpoint_io
from drafters.models.dflash import DFlash
from drafters.models.hf_dllm import Dllm

pytest.register_assert_rewrite("contract")
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of small Llamas, without special tokens
HEADS |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# A slow test finds no lines of progress where it expects an empty log.
os.environ.setdefault("FOREDRAFT_PROGRESS_SECONDS", "86400")
# Hypothesis' own profile, everywhere: the same cases in every run, and none fails for being slow.
hypothesis.settings.load_profile("ci")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `drafter_name` runs once for every drafter that has a yaml in conf/drafter."""
    if "drafter_name" in metafunc.fixturenames:
        metafunc.parametrize("drafter_name", drafters())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """CI runs the core, and a covering part of its cases; the rest are proofs."""
    mark_tiers(items)
    mark_proofs(items)


def pytest_collection_finish() -> None:
    """Imports and collected tests stay to the end: the garbage collector need not look at them again."""
    gc.collect()
    gc.freeze()


def drafters() -> list[str]:
    """Names of conf/drafter and of installed packages, but for `auto`, which chooses one of the others."""
    return [name for name in options(ROOT / "conf", "drafter") if name != "auto"]


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of tests are noted in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _reproducible():
    torch.set_num_threads(1)  # models are tiny: threads only contend
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _yaml_read_once():
    """Hydra parses every yaml again for every configuration, in a fifth of the time that one takes."""
    Plugins.instance()  # which registers the readers
    with pytest.MonkeyPatch.context() as patch:
        for source in map(SourcesRegistry.instance().resolve, ("file", "pkg")):
            patch.setattr(source, "load_config", _remembering(source.load_config))
        yield


def _remembering(load: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    known: dict[tuple, Any] = {}

    def remembered(source: Any, config_path: str) -> Any:
        file = Path(source.path, source._normalize_file_name(config_path).lstrip("/"))
        key = source.provider, file, file.stat().st_mtime_ns if file.is_file() else 0
        if key not in known:
            known[key] = load(source, config_path)
        return copy.deepcopy(known[key])

    return remembered


@pytest.fixture(scope="session")
def pocket() -> Target:
    """The bundled target in fp32, tapped where EAGLE reads."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "data" / "pocket", dtype=torch.float32)
    return Target(model, [LAST])


@pytest.fixture(scope="session")
def tiny_target() -> Callable[..., Target]:
    """Makes a random Llama (or, with a window, Mistral) whose rows are spread and heed every token.

    Norms are torch's, because transformers' round to fp32 inside, which is too coarse for 1e-12.
    """

    def make(vocab=3, layers=2, hidden=8, window=None, positions=64, seed=0, dtype=torch.float64) -> Target:
        torch.manual_seed(seed)
        shape: dict[str, Any] = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden}
        shape |= {"num_hidden_layers": layers, "head_dim": hidden // 2, "max_position_embeddings": positions}
        shape |= HEADS | {"tie_word_embeddings": False}
        if window:
            model = MistralForCausalLM(MistralConfig(**shape, sliding_window=window))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
        model = model.to(dtype)
        for parent in list(model.modules()):
            for name, child in parent.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(parent, name, nn.RMSNorm(hidden, eps=1e-6, dtype=dtype))
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                spread = 1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5
                nn.init.normal_(weight, std=spread)
        return Target(model, [LAST])

    return make


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory) -> Callable[[int], str]:
    """Makes the folder of a tiny Llama with a given vocabulary, for drafters that begin with one."""
    root = tmp_path_factory.mktemp("drafts")

    def make(vocab: int) -> str:
        if not (root / str(vocab)).exists():
            shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
            config = LlamaConfig(vocab_size=vocab, max_position_embeddings=64, **shape, **HEADS)
            LlamaForCausalLM(config).save_pretrained(root / str(vocab))
        return str(root / str(vocab))

    return make


def _sizes(yaml: Any, target: Target, depth: int, draft_folder: Callable[[int], str]) -> dict[str, Any]:
    """What a drafter's yaml says, as it fits a small target."""
    sizes: dict[str, Any] = {"depth": depth} if "depth" in yaml else {}
    if "taps" in yaml and len(target.layers) < 7:
        sizes["taps"] = [0, 1, len(target.layers) - 1]
    if "draft_vocab_size" in yaml:  # a smaller one of any drafter is tested apart
        always = "norm_before_fc" in yaml  # EAGLE-3's, which has rows of its own
        sizes["draft_vocab_size"] = max(1, target.vocab_size // 4) if always else None
    if "sublayers" in yaml:  # the search is tested apart
        sizes["sublayers"] = ("ba-m" * len(target.layers))[: len(target.layers)]
    if "refresh" in yaml:  # so that a text of some twenty places has all of them
        sizes |= {"sinks": 1, "recent": 6, "places": 3, "refresh": 3, "queries": 2}
    if "reuse" in yaml:  # a draft with memory is tested apart
        sizes["reuse"] = {**yaml.reuse, "mode": "none"}
    if yaml.get("path") or "mask_token" in yaml:
        sizes["path"] = draft_folder(target.vocab_size)
    if "mask_token" in yaml:  # the folder names none
        sizes["mask_token"] = target.vocab_size - 1
    parts = [part for part in ("first", "second") if yaml.get(part)]
    sizes |= {part: _sizes(yaml[part], target, depth, draft_folder) for part in parts}
    if "trees" in yaml:  # so that the second takes part in every plan
        sizes["trees"] = True
    if "mask_id" in yaml:  # five layers test nothing that two do not
        sizes["layers"] = 2
    return sizes


def _scatter(drafter: Drafter) -> None:
    """Random weights; a fresh drafter may leave out whole blocks."""
    for weight in drafter.parameters():
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5)
    if isinstance(drafter, Dllm):  # masks are alike but for what they attend to, so let that differ
        for layer in drafter.model.base_model.layers:
            layer.self_attn.q_proj.weight.data.mul_(9)
    if isinstance(drafter, DFlash):
        for layer in drafter.stack:
            layer.q_norm.weight.data.mul_(9)


@pytest.fixture(scope="session")
def make_drafter(draft_folder) -> Callable[..., Drafter]:
    """Builds a drafter from its yaml for a target, with random weights, all of which matter."""
    known: dict[str, Any] = {}

    def make(name: str, target: Target, seed: int = 0, depth: int = 3, **options: Any) -> Drafter:
        if name not in known:
            ignored = warnings.catch_warnings(action="ignore")  # a group's yaml has no `_self_`
            with configurations(ROOT / "conf"), ignored:
                drafter = compose(f"drafter/{name}").drafter  # the whole configuration takes longer
            known[name] = OmegaConf.masked_copy(drafter, [key for key in drafter if key not in OF_ANY])
        settings = _sizes(known[name], target, depth, draft_folder)
        if "first" in known[name] and known[name].first is None:  # a trained drafter is asked for
            trained = make("eagle", target, seed + 1, depth)
            trained.origin = checkpoint_io.origin_of(trained, target)
            settings["first"] = lambda _: trained
        torch.manual_seed(seed)
        drafter = instantiate(known[name], **settings | options)(target).to(target.dtype).eval()
        target.tap(drafter.taps)
        if drafter.needs_fit:
            drafter.fit(random_rollouts(target.vocab_size), target)
        _scatter(drafter)
        return drafter

    return make


@pytest.fixture
def fake_hub(monkeypatch, tmp_path) -> Iterator[FakeHub]:
    """A Hub on this machine, which huggingface_hub talks to, with a token, for as long as the test runs."""
    with FakeHub() as hub:
        constants = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
        }
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture(scope="session")
def _pairs() -> dict[str, tuple[Target, Drafter]]:
    """What `pair` has made."""
    return {}


@pytest.fixture
def pair(tiny_target, make_drafter, drafter_name, _pairs) -> tuple[Target, Drafter]:
    """A target and a drafter in fp32, for the contract every drafter keeps; a test's own copy."""
    if drafter_name not in _pairs:
        _pairs[drafter_name] = both(tiny_target, make_drafter, drafter_name)
    return copy.deepcopy(_pairs[drafter_name])


@pytest.fixture
def ragged() -> tuple[Head, Tensor, list[Tensor], list[Tensor]]:
    """The target's head, its input, and ragged anchors and hidden states of three depths, in fp64."""
    dice = torch.Generator().manual_seed(0)
    rows, length, width, vocab = 2, 7, 6, 11

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, dtype=torch.float64)

    head = Head(draw(vocab, width), draw(vocab), scale=0.7, softcap=5.0)
    anchors = [torch.tensor(a) for a in ([0, 1, 2, 3, 8, 9], [0, 1, 2, 9], [1])]
    return head, draw(rows, length, width), anchors, [draw(len(a), width) for a in anchors]


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """No probe of a target is remembered from elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    """A target, prompts and a place for outputs, of a module's own."""
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> tuple[Target, Chat, list[Prompt]]:
    """Target, chat and nine prompts, two of them too long."""
    root = tmp_path_factory.mktemp("rollouts")
    folder = str(make_target(root / "target"))
    prompts = read_prompts(write_prompts(root / "p.jsonl", 7))
    prompts += [Prompt.of(f"long-{i}", ({"role": "user", "content": "x" * 80},)) for i in range(2)]
    return load_target(folder), Chat(load_tokenizer(folder)), prompts


@pytest.fixture
def writer(parts) -> Writer:
    """Makes their rows."""
    return make_writer(parts[0], parts[1], PLAN)
