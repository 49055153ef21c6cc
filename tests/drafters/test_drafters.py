"""Collects the contract of drafters (tests/support/contract.py), for every one in conf/drafter."""

from contract import *  # noqa: F403
