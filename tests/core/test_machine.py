"""Any sequence of calls: every restore is right, every count adds up, every victim is legal."""

from __future__ import annotations

from hypothesis import settings

from tests.machinery.machine import PoolMachine, pool_machine

TestTight = PoolMachine.TestCase
TestTight.settings = settings(max_examples=150, stateful_step_count=40, report_multiple_bugs=False)
TestRoomy = pool_machine(roomy=True).TestCase
TestRoomy.settings = settings(max_examples=60, stateful_step_count=40, report_multiple_bugs=False)
