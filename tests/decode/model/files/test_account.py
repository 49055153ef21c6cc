"""Accounts of files."""

import json

import pytest

from decode.errors import UserError
from decode.model.files.account import Account


def _account() -> Account:
    account = Account("weights")
    account.count("tensors", 70)
    account.count("tensors", 5)
    account.ignore("computed again by the class", ["rotary.inv_freq"])
    account.remark("layers for drafting, which the class leaves out", ["layers.2.a", "layers.2.b"])
    return account


def test_account_counts_and_lists_with_reasons():
    account = _account()
    account.check("target=folder")  # nothing is refused
    assert account.remarks() == [
        "weights: layers.2.a and 1 more: layers for drafting, which the class leaves out"
    ]
    assert account.lines() == [
        "weights: 75 tensors read",
        "  harmless: rotary.inv_freq: computed again by the class",
        "  not read: layers.2.a and 1 more: layers for drafting, which the class leaves out",
    ]


def test_refused_name_is_one_line_with_the_first_and_how_many():
    account = _account()
    account.refuse("biases that the class has no place for", [f"q\n{i}" for i in range(3)])
    account.refuse("another reason", ["x"])
    with pytest.raises(UserError) as error:
        account.check("target=folder")
    assert str(error.value) == (
        "target=folder: weights: q?0 and 2 more: biases that the class has no place for"
    )
    assert "  refused: x: another reason" in account.lines()


def test_no_names_leave_no_reason():
    account = Account("weights")
    account.refuse("nothing", [])
    account.check("target=folder")
    assert account.lines() == ["weights: nothing read"]


def test_account_survives_json():
    account = _account()
    assert Account.from_json(json.loads(json.dumps(account.as_json()))) == account
