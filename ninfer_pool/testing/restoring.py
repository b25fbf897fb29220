"""Conformance: a resumed run equals a recomputed one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ninfer_pool.core.prompt import KINDS
from ninfer_pool.testing.kit import Kit
from ninfer_pool.testing.workload import edges, shifted

EDGES = (-1, 0, 1)
"""Tokens past a page's edge: position p with p mod page_tokens in {page_tokens - 1, 0, 1}."""


class Restoring(Kit):
    """Checkpoints, frontiers, drafts, forks, identity."""

    # -- restored equals recomputed --------------------------------------------------------

    @pytest.mark.parametrize("off", EDGES)
    def test_restored_equals_recomputed_at_a_page_edge(self, off: int) -> None:
        """Two next tokens on one checkpoint next to a page's edge; then both again, deeper."""
        host = self.host("G5: restored equals recomputed at a page's edge")
        end = 2 * host.config.page_tokens + off
        head, marks = self.words(host, end), [(end, "turn")]
        exact = host.config.end_logits or not host.config.image_bytes
        host.serve(head, boundaries=marks)
        given: dict[str, Any] = {"boundaries": [*marks, (end + 3, "turn")], "exact": exact}
        for token in self.two(host):
            more = [*head, token, *self.words(host, 2, part=token)]
            host.serve(more, answer=self.words(host, 3, part=7), start=end, **given)
        for token in self.two(host):
            more = [*head, token, *self.words(host, 2, part=token), token]
            host.serve(more, answer=[token], start=end + 3, **given)

    @pytest.mark.parametrize("kind", KINDS[:-1])
    def test_restored_equals_recomputed_at_a_checkpoint(self, kind: str) -> None:
        """Every kind of declared boundary, inside a page and at its edge."""
        for end in edges(self.host("").config.page_tokens)[1:7]:
            host = self.host(f"G5: restored equals recomputed at a {kind} checkpoint at {end}")
            head, (one, other) = self.words(host, end), self.two(host)
            given: dict[str, Any] = {"boundaries": [(end, kind)], "answer": [one, other]}
            host.serve([*head, one, one], **given)
            host.serve([*head, other, one], start=end, exact=True, **given)

    @pytest.mark.parametrize("off", EDGES)
    def test_restored_equals_recomputed_at_a_frontier(self, off: int) -> None:
        """A follow-up resumes behind generated tokens, with two different next tokens."""
        host = self.host("G5: restored equals recomputed at a frontier next to a page's edge")
        end = 2 * host.config.page_tokens + off
        head, answer = self.words(host, end - 3), self.words(host, 3, part=1)
        host.serve(head, answer=answer)
        for token in self.two(host):
            host.serve([*head, *answer, token, token], answer=[token], start=end)

    @pytest.mark.parametrize("off", EDGES)
    def test_a_full_hit_yields_the_logits_of_a_cold_run(self, off: int) -> None:
        """The same prompt again: nothing is prefilled, or the last token alone."""
        host = self.host("G5: a prompt resumed at its end goes on as a cold run does")
        end = 2 * host.config.page_tokens + off
        head = self.words(host, end)
        last = end if host.config.end_logits else end - 1
        for start in (0, last, last):
            host.serve(head, answer=self.two(host), start=start, reserve_tokens=2, retain=not start)

    def test_restored_equals_recomputed_over_many_turns(self) -> None:
        """A conversation goes from lane to lane, each turn on the frontier of the last."""
        host = self.host("G5: restored equals recomputed over many turns")
        tokens: list[int] = []
        for turn in range(5):
            new = self.words(host, host.config.page_tokens // 2 + turn, part=turn)
            lane = turn % host.config.lanes if host.config.affinity == "prefer" else None
            start = len(tokens) if turn else 0
            done = host.serve([*tokens, *new], answer=new[:3], start=start, lane=lane)
            tokens = done.tokens

    def test_restored_equals_recomputed_many_pages_out(self) -> None:
        """Long prompts: a resume behind many pages, many pages in one call, and both again."""
        host = self.host("G5: restored equals recomputed behind many pages")
        page = host.config.page_tokens
        head, one = self.words(host, 9 * page + 1), self.two(host)[0]
        host.serve(head[: page + 1])
        for end in (5 * page + 1, 9 * page + 1):
            host.serve(head[:end], answer=[one, one])
        host.serve([*head, one, one, one], start=len(head) + 2, answer=[one])

    def test_positions_count(self) -> None:
        """Other positions on one axis share nothing past where they part; equal ones all."""
        host = self.host("G5: KV of other positions is not resumed")
        if not getattr(host.raw, "takes_positions", False):
            pytest.skip("takes no positions")
        end = 2 * host.config.page_tokens + 1
        head, (one, other) = self.words(host, end), self.two(host)
        for stem, start in ((0, 0), (1, 0), (0, end), (1, end)):
            more = [*head, other] if start else head
            given: dict[str, Any] = {"positions": shifted(len(more), stem=stem)}
            if host.config.image_bytes or start:
                given["start"] = start
            host.serve(more, boundaries=[(end, "turn")], answer=[one], **given)

    # -- drafts, forks, lanes ----------------------------------------------------------------

    @pytest.mark.parametrize("accepted", [0, 1, 2, 3])
    def test_rejected_drafts_leave_no_trace(self, accepted: int) -> None:
        """Drafts over a page's edge are taken back; what follows is as if they never were."""
        page = self.host("").config.page_tokens
        for end in range(2 * page - 3, 2 * page + 1):
            host = self.host(f"G5: of three drafts from {end} on, {accepted} accepted")
            head, (one, other) = self.words(host, end - 1), self.two(host)
            host.serve(head)
            before = host.serve(self.words(host, 3 * page, part=1), retain=False).lease.lane
            lane = before if host.config.affinity == "prefer" else None
            with host.admit([*head, one], lane=lane, start=end - 1) as running:
                running.restore()
                while running.step():
                    pass
                if not running.draft([one, other, one], accepted=accepted):
                    host.fail("no room for drafts")
                running.decode([other, other])
                running.finish()
            for token in (one, other):
                host.serve([*running.tokens, token], start=end + accepted + 2)

    def test_one_entry_forks_into_every_lane_at_once(self) -> None:
        """All lanes resume one entry inside a page, and go their own ways step by step."""
        host = self.host("G5: many forks of one entry do not mix")
        lanes = self.lanes(host)
        for end in edges(host.config.page_tokens)[2:5]:
            head, one = self.words(host, end, part=end), self.two(host)[0]
            host.serve(head, boundaries=[(end, "turn")])
            tails = [[(one + lane) % host.raw.vocab_size] * 2 for lane in range(lanes)]
            given: dict[str, Any] = {"boundaries": [(end, "turn")], "start": end}
            running = [host.admit([*head, *tail], **given) for tail in tails]
            self.together(running, [[tail[0], one, one] for tail in tails])
            for forked in running:
                host.serve([*forked.tokens, one], answer=[one], start=len(forked.tokens))

    def test_interleaved_lanes_do_not_mix(self) -> None:
        """Cold prompts of several lengths run a step each in turn."""
        host = self.host("G5: lanes that run in turn do not mix")
        lanes, page = self.lanes(host), host.config.page_tokens
        heads = [self.words(host, 2 * page + lane, part=lane) for lane in range(lanes)]
        marks = [(page - 1, "system"), (page + 1, "turn")]
        running = [host.admit(head, boundaries=marks) for head in heads]
        self.together(running, [head[: page + 2] for head in heads])
        for one in running:
            more = [*one.tokens, one.tokens[0]]
            host.serve(more, answer=more[:2], boundaries=marks, start=len(one.tokens))

    @pytest.mark.parametrize("leader_first", [False, True])
    def test_a_published_checkpoint_is_complete(self, *, leader_first: bool) -> None:
        """A sibling resumes what a running request published, while that goes on."""
        for end in edges(self.host("").config.page_tokens)[1:5]:
            host = self.host(f"G11: published at {end} means complete")
            self.lanes(host)
            head, (one, other) = self.words(host, end), self.two(host)
            given: dict[str, Any] = {"boundaries": [(end, "system")]}
            leader = host.admit([*head, one, one], **given)
            leader.restore()
            while leader.lease.frontier < end:
                leader.step()
            leader.lease.publish()
            if leader_first:
                leader.step()
            follower = host.admit([*head, other, one], start=end, **given)
            self.together([follower], [[one, one]])
            with leader:
                while leader.step():
                    pass
                leader.decode([one, other])
                leader.finish()

    # -- identity --------------------------------------------------------------------------

    @pytest.mark.parametrize("field", ["salt", "weights", "kv_dtype", "rope", "draft", "adapter"])
    def test_another_identity_shares_nothing(self, field: str) -> None:
        """The same tokens under a namespace that differs in one field start from nothing."""
        host = self.host(f"G5: another {field} shares nothing")
        end = host.config.page_tokens + 1
        head, (one, other) = self.words(host, end), self.two(host)
        changed: dict[str, Any] = {field: "another"}
        space = dataclasses.replace(host.raw.namespace, **changed)
        for namespace, token, start in (
            (None, one, 0),
            (space, one, 0),
            (None, other, end),
            (space, other, end),
        ):
            given: dict[str, Any] = {"boundaries": [(end, "turn")], "namespace": namespace}
            host.serve([*head, token], start=start, answer=[one], **given)

    def test_another_identity_is_named_by_every_engine(self) -> None:
        """Two engines of one factory share, another factory's have another namespace."""
        host = self.host("G5: engines that differ have namespaces that differ")
        if type(self).make().namespace != host.raw.namespace:
            host.fail("two engines of one factory have two namespaces: nothing is ever resumed")
        for other in self.others:
            if other().namespace == host.raw.namespace:
                host.fail(f"another engine's namespace is the same: {host.raw.namespace}")
