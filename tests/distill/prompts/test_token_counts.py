"""Tokens of prompts are counted once, and the same by several processes."""

import numpy as np
import pytest
from chats import say, tokenizer_of

from distill.prompts import token_counts as module
from distill.prompts.chat_template import Chat
from distill.prompts.prompt import Prompt, opening
from distill.prompts.token_counts import count_tokens


@pytest.fixture
def prompts() -> list[Prompt]:
    """One in five has a system message, which Gemma's template refuses."""
    texts = [" ".join(["word"] * (1 + i % 7)) + str(i) for i in range(40)]
    return [
        Prompt.of(str(i), tuple(say(text, "Yes", **({"system": "Be brief."} if i % 5 == 3 else {}))))
        for i, text in enumerate(texts)
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "FEW", 10)
    monkeypatch.setattr(module, "CHUNK", 4)
    return tmp_path / "foredraft" / "prompts"


@pytest.fixture
def counted(monkeypatch) -> list[Prompt]:
    """The prompts that are counted in this process."""
    seen, count = [], module._count_chunk
    monkeypatch.setattr(module, "_count_chunk", lambda part, given: seen.extend(part) or count(part, given))
    return seen


@pytest.mark.parametrize("given", [False, True])
def test_prompts_are_counted_once(prompts, folder, counted, given):
    chat = Chat(tokenizer_of("gemma"))
    tokens, refusals = count_tokens(prompts, chat, given)
    assert sorted(refusals) == np.flatnonzero(tokens < 0).tolist() == list(range(3, 40, 5))
    assert all("no system role" in reason for reason in refusals.values())
    for prompt, count in zip(prompts, tokens, strict=True):
        if count >= 0:
            assert count == len(chat.encode(opening(prompt.messages)))
    counted.clear()
    again = count_tokens([*reversed(prompts)], chat, given)
    assert [int(p.id) for p in counted] == [*range(38, 0, -5)], "refused ones are not remembered"
    assert again.tokens[::-1].tolist() == tokens.tolist()
    counted.clear()
    count_tokens(prompts, Chat(tokenizer_of("gemma"), options={"other": 1}), given)
    count_tokens(prompts, chat, not given)
    assert len(counted) == 80, "another template, and another question"
    assert len(list(folder.glob("*.npy"))) == 3
    assert b"word" not in b"".join(path.read_bytes() for path in folder.iterdir())


def test_several_processes_count_the_same(prompts, folder, monkeypatch):
    chat = Chat(tokenizer_of("gemma"))
    whole = count_tokens(prompts, chat, False)
    for path in folder.glob("*.npy"):
        path.unlink()
    monkeypatch.setattr(module, "SECONDS", 0.0)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: {0, 1})
    tokens, refusals = count_tokens(prompts, chat, False)
    assert tokens.tolist() == whole.tokens.tolist()
    assert refusals == whole.refusals


def test_counts_before_a_stop_are_kept(prompts, counted, monkeypatch):
    chat = Chat(tokenizer_of("chatml"))
    count = module._count_chunk

    def stopped(part, given):
        if len(counted) >= 12:
            raise KeyboardInterrupt
        return count(part, given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_count_chunk", stopped)
        with pytest.raises(KeyboardInterrupt):
            count_tokens(prompts, chat, False)
    counted.clear()
    assert (count_tokens(prompts, chat, False).tokens > 0).all()
    assert len(counted) == 28


@pytest.mark.parametrize("damage", ["nothing", "half", "text", "another array"])
def test_damaged_file_is_counted_again(prompts, folder, counted, damage):
    chat = Chat(tokenizer_of("chatml"))
    tokens, _ = count_tokens(prompts, chat, False)
    (path,) = folder.glob("*.npy")
    data = path.read_bytes()
    if damage == "another array":
        np.save(path, np.arange(3))
    else:
        path.write_bytes({"nothing": b"", "half": data[: len(data) // 2], "text": b"1"}[damage])
    counted.clear()
    assert count_tokens(prompts, chat, False).tokens.tolist() == tokens.tolist()
    assert len(counted) == 40
    assert path.read_bytes() == data


def test_counts_without_a_file(prompts, folder, tmp_path, monkeypatch):
    chat = Chat(tokenizer_of("chatml"))
    few = count_tokens(prompts[:10], chat, False)
    assert not folder.exists(), "few are not worth a file"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # which cannot be written to
    assert count_tokens(prompts, chat, False).tokens[:10].tolist() == few.tokens.tolist()
