"""Lossy verification rules, their effect on the distribution, and judges of answer steps."""
