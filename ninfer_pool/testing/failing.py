"""Conformance: memory, pressure, cancelled and failing requests, random workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from ninfer_pool.core.prompt import Prompt
from ninfer_pool.testing.host import Cold, EngineFailure, Host, Running, compare
from ninfer_pool.testing.kit import Kit
from ninfer_pool.testing.workload import Act, Begin, Player, workloads

CALLS = ("save_image", "load_image", "copy_page", "reset", "prefill", "decode")
"""Calls that fail in turn."""
MOST_CALLS = 100
EXAMPLES, USUAL = 40, 100
"""Random workloads by default; the examples that a Hypothesis profile has by default."""


def asked_for(profile: int) -> int:
    """Return how many random workloads to play, where the profile has ``profile`` examples."""
    return profile if profile > USUAL else EXAMPLES


class Failing(Kit):
    """Requests that remain are right whatever happens to others."""

    # -- memory ----------------------------------------------------------------------------

    def test_a_cold_run_is_the_same_in_every_lane_and_page(self) -> None:
        """Whatever ran there before, and whichever pages it is given."""
        host = self.host("G5: a cold run depends on its tokens alone")
        first, cold = host.admit(self.words(host, 4 * host.config.page_tokens - 1)), self.cold()
        prompt, answer = first.lease.prompt, self.two(host)
        wanted = Cold(type(self).make()).run(prompt, answer)
        order = np.random.default_rng(self.seed)
        for lane in 3 * [*range(host.config.lanes)]:
            table = order.permutation(host.raw.config.num_pages).astype(np.int32)[:5]
            seen = cold.run(prompt, answer, lane=lane, table=table)
            for at, logits in wanted.items():
                wrong = compare(seen[at], logits, tolerance=0.0)
                if wrong:
                    host.fail(f"after {at} tokens in lane {lane}, pages {table.tolist()}: {wrong}")

    def test_free_and_recycled_pages_may_hold_anything(self) -> None:
        """Free pages are poisoned at every step, or left full of another prompt's rows."""
        host = self.host("G5: nothing is read that the request did not write or resume")
        page = host.config.page_tokens
        head, one = self.words(host, 2 * page + 1), self.two(host)[0]
        host.serve(head)
        host.serve(self.words(host, 4 * page, part=1), retain=False, answer=[one, one])
        with host.admit([*head, one, one], start=len(head)) as running:
            host.poison()
            running.restore()
            host.poison()
            while running.step():
                host.poison()
            running.decode([one] * page)
            running.finish()

    @pytest.mark.parametrize("more", [-1, 0, 1])
    def test_a_lane_keeps_nothing_of_its_last_request(self, more: int) -> None:
        """A request resumes where its lane's last one ended, or a token next to it."""
        host = self.host("G5: a lane keeps nothing of its last request")
        end, (one, other) = 2 * host.config.page_tokens + 1, self.two(host)
        head, stranger = self.words(host, end), self.words(host, end + more, part=1)
        first = host.serve(head).lease.lane
        lane = first if host.config.affinity == "prefer" else None
        host.serve(stranger, lane=lane, retain=False)
        host.serve([*head, one], start=end, lane=lane, answer=[other])

    def test_images_and_pages_are_copied_whole(self) -> None:
        """An image brought to another lane and saved there is the same, byte by byte."""
        host = self.host("G5: images and pages are copied whole, and copies stay")
        engine, count = host.raw, host.config.image_pages
        page, lane, token = host.config.page_tokens, host.config.lanes - 1, self.two(host)[0]
        words = (self.words(host, page + 1, part=part) for part in (0, 1))
        first, other = (Prompt(tokens, namespace=engine.namespace) for tokens in words)
        here, there = (tuple(range(8 + n * count, 8 + n * count + count)) for n in (0, 1))
        cold = Cold(engine)
        cold.run(other, lane=lane, table=np.array([6, 7], dtype=np.int32))
        cold.run(first, table=np.array([3, 2], dtype=np.int32))
        for source, target in ((3, 5), (2, 4)):
            host.engine.copy_page(source, target)
        if not count:
            return
        engine.save_image(0, here)
        image = [engine.read_page(at) for at in here]
        engine.load_image(lane, here)
        engine.save_image(lane, there)
        size = host.config.image_bytes
        for name, pages in (("first", here), ("second", there)):
            if b"".join(map(engine.read_page, pages))[:size] != b"".join(image)[:size]:
                host.fail(
                    f"saved, loaded into lane {lane}, saved: the {name} image is not the same"
                )
        ways = ((0, [3, 2]), (lane, [5, 4]))
        wanted, found = (cold.after(token, page + 1, lane=n, table=pages) for n, pages in ways)
        wrong = compare(found, wanted, tolerance=0.0)
        if lane and wrong:
            host.fail(f"lane {lane} does not go on as lane 0, whose image it loaded: {wrong}")

    # -- pressure --------------------------------------------------------------------------

    def test_recycled_pages_keep_nothing(self) -> None:
        """More conversations than fit: each is evicted and comes back, and is right."""
        host = self.host("G5: evicted and recycled pages keep nothing", num_pages=self.tight(1))
        page = host.config.page_tokens
        for part in (*range(5), *range(5), 4, 3):
            head = self.words(host, 2 * page - 1 + part % 3, part=part)
            done = host.serve(head, boundaries=[(page + 1, "system")], answer=head[:2])
            given: dict[str, Any] = {"start": len(done.tokens), "retain": False}
            host.serve([*done.tokens, head[0]], answer=head[:1], **given)
        if not host.pool.stats().counters.evictions:
            host.fail("nothing was evicted: the test tests nothing")

    def test_eviction_between_plan_and_restore(self) -> None:
        """What a lease is going to restore stays, while others evict and write what they can."""
        host = self.host("G4: what a lease will restore is kept", num_pages=self.tight(2))
        self.lanes(host)
        page = host.config.page_tokens
        head, (one, other) = self.words(host, 2 * page + 1), self.two(host)
        host.serve(head)
        waiting = host.admit([*head, one, other], start=len(head))
        for part in range(1, 5):
            running = host.begin(self.words(host, 3 * page, part=part))
            if running is not None:
                self.together([running], [[one, other]])
        self.together([waiting], [[other, one, one]])
        host.serve([*head, other], answer=[one])

    def tight(self, lanes: int) -> int:
        """Return pages for a few checkpoints next to running requests."""
        return (4 + 3 * lanes) + (2 + 2 * lanes) * type(self).make().config.image_pages

    # -- cancelled and failing ----------------------------------------------------------------

    def steps(self, host: Host, tokens: Sequence[int], answer: Sequence[int]) -> Iterator[Running]:
        """Run one request; stop after each of its steps."""
        running = host.admit(tokens, boundaries=[(len(tokens) - 1, "turn")])
        yield running
        running.restore()
        yield running
        while running.step():
            yield running
        for token in answer:
            running.decode([token])
            yield running
        with running:
            running.finish()

    def test_a_request_cancelled_at_any_step_leaves_no_trace(self) -> None:
        """The pool is as it was (G6), and what the request had resumed is still right."""
        host = self.host("G6: a request that is cancelled leaves no trace")
        head, (one, other) = self.words(host, 2 * host.config.page_tokens - 1), self.two(host)
        host.serve(head)
        for stop in range(1, MOST_CALLS):
            before = host.pool.stats()
            steps = self.steps(host, [*head, one, other], [other, one, one])
            running = [step for _, step in zip(range(stop), steps, strict=False)]
            if len(running) < stop:
                break
            running[-1].cancel()
            after = host.pool.stats()
            for name in ("entries", "checkpoints", "retained_bytes", "pages_free", "leases"):
                if getattr(before, name) != getattr(after, name):
                    host.fail(f"cancelled after step {stop}: {name} is {getattr(after, name)}")
            host.audit()
            lane = running[-1].lease.lane if host.config.affinity == "prefer" else None
            stranger = host.admit(self.two(host), lane=lane)
            stranger.restore()
            stranger.cancel()
            host.serve([*head, other], answer=[one], retain=False, start=len(head), lane=lane)
        host.serve([*head, one, other, other, one, one], answer=[other])

    @pytest.mark.parametrize("call", CALLS)
    def test_a_failing_call_leaves_pool_and_engine_right(self, call: str) -> None:
        """The n-th call raises, before or after it did its work, for every n there is."""
        engine = type(self).make()
        if call.endswith("image") and not engine.config.image_bytes:
            pytest.skip("has no images")
        for number in range(1, MOST_CALLS):
            for late in (False, True):
                about = f"G5: {call} raises at call {number}, {'done' if late else 'not begun'}"
                host = self.host(about)
                if not self.failed(host, call, number, late=late):
                    return
                if host.pool.running:
                    host.fail("the request still runs")
                host.audit()
                self.life(host)

    def failed(self, host: Host, call: str, number: int, *, late: bool) -> bool:
        """Serve requests and make a call fail; return whether there were as many calls."""
        calls = 0

        def raises(name: str) -> None:
            nonlocal calls
            calls += name == call
            if name == call and calls == number:
                raise EngineFailure(f"{call}, call {number}")

        place = "after_call" if late else "before_call"
        setattr(host.engine, place, raises)
        try:
            self.life(host)
        except EngineFailure:
            return True
        finally:
            setattr(host.engine, place, None)
        return False

    def life(self, host: Host) -> None:
        """Serve a conversation of two turns, a fork of it, and the whole once more."""
        head, (one, other) = self.words(host, 2 * host.config.page_tokens + 1), self.two(host)
        done = host.serve(head, answer=[one, other], boundaries=[(len(head), "turn")])
        host.serve([*done.tokens, other], answer=[one])
        host.serve([*head, other, other], answer=[one], boundaries=[(len(head), "turn")])
        host.serve(done.tokens, answer=[one])

    # -- at random -------------------------------------------------------------------------

    @pytest.mark.parametrize("room", ["roomy", "tight"])
    def test_random_workloads(self, room: str) -> None:
        """Requests that share, part, fork, draft, publish, cancel and evict, as they come."""
        engine = type(self).make()
        changes = {"num_pages": self.tight(2)} if room == "tight" else {}
        stems = [self.words(self.host(""), 4 * engine.config.page_tokens, part=p) for p in (0, 1)]

        @seeded(self.seed)
        @settings(
            max_examples=self.examples or asked_for(settings().max_examples),
            derandomize=False,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if self.shrink else [])],
        )
        @given(workloads(engine.config.page_tokens))
        def play(workload: list[Begin | Act]) -> None:
            host = self.host(f"G5 and G11 over a random workload in a {room} pool", **changes)
            Player(host, stems, word=lambda number: (number + 1) % engine.vocab_size).play(workload)

        play()
