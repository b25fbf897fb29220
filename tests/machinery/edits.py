"""Wrong edits of the core, one per row, each with the test that detects it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One line of ``file``, below the package, made wrong.

    ``right`` occurs there just once: the line's text, or as much around it as tells it apart.
    """

    file: str
    right: str
    wrong: str
    name: str
    """What is wrong then."""
    test: str
    """The pytest node that must fail."""


# What is wrong then; the file; the right text; the wrong one; the test in tests/core.
ROWS = (
    (
        "a lease's end frees what a checkpoint holds",
        "core/ledger.py",
        "self.checkpoint_refs.take(last) == 0",
        "self.checkpoint_refs.take(last) >= 0",
        "test_lease.py::test_backing_over_a_checkpoint_gives_its_image_back",
    ),
    (
        "pages taken are not counted as leased",
        "core/ledger.py",
        "self.lease_refs[units] = 1",
        "self.lease_refs[units] += 0",
        "test_lease.py::test_after_its_end_every_method_raises",
    ),
    (
        "a branch extends the node that it parts from",
        "core/radix.py",
        "if upto == node.end:",
        "if upto >= node.start:",
        "test_lease.py::test_it_says_what_it_reuses",
    ),
    (
        "exact=True takes what is not exact",
        "core/lookup.py",
        "(exact or not filter.exact)",
        "True",
        "test_cuts.py::test_checkpoints_of_one_position_and_other_cuts_stand_side_by_side",
    ),
    (
        "the essential point is the end though it has no logits",
        "core/lookup.py",
        "prompt.length - 1",
        "prompt.length",
        "test_cuts.py::test_without_logits_of_the_end_one_token_is_left_to_compute",
    ),
    (
        "the next grid cut is one further",
        "core/planner.py",
        "// grid + 1) * grid",
        "// grid + 2) * grid",
        "test_search.py::test_plain_attention_says_where_it_resumes",
    ),
    (
        "a position outside media counts as inside",
        "core/prompt.py",
        "return any(span.begin <",
        "return not any(span.begin <",
        "test_lease.py::test_what_truncate_refuses",
    ),
    (
        "a ghost at the very end is not seen",
        "core/ghosts.py",
        "above < position <= limit",
        "above < position < limit",
        "test_ghosts.py::test_a_ghost_that_is_forgotten_leaves_nothing_behind",
    ),
    (
        "superseded points go only while guarded",
        "core/eviction.py",
        "if not checkpoint.refs:",
        "if checkpoint.refs:",
        "test_lease.py::test_a_superseded_tail_is_told_and_then_its_end",
    ),
    (
        "the budget counts as kept at once",
        "core/eviction.py",
        "lambda: ledger.retained <= limit",
        "lambda: True",
        "test_lease.py::test_a_superseded_tail_is_told_and_then_its_end",
    ),
    (
        "the prompt's end is the last to be kept",
        "core/eviction.py",
        "each.position != prompt_end",
        "each.position == prompt_end",
        "test_budget.py::test_the_prompt_s_end_is_kept_before_the_answer_s",
    ),
    (
        "one commit counts as several uses",
        "core/entry.py",
        "if self.used != tick:",
        "if True:",
        "test_policies.py::test_one_commit_uses_an_entry_once",
    ),
    (
        "a key forgets how many tokens there are",
        "core/identity.py",
        'struct.pack("<Q", size), *tokens',
        "*tokens",
        "test_keys.py::test_a_key_is_the_hash_of_the_documented_encoding",
    ),
    (
        "a pin taken off stays noted",
        "core/state.py",
        "        entry.pinned = None",
        "        pass",
        "test_guarantees.py::test_g4_a_pinned_entry_outlives_any_k",
    ),
    (
        "a commit at a wrong position is believed",
        "core/lease.py",
        "if position is not None and position != self.frontier:",
        "if False:",
        "test_guarantees.py::test_g5_a_position_that_is_not_the_pools_is_quarantined",
    ),
    (
        "a key forgets what tokens carry",
        "core/identity.py",
        "for position, payload in attributes:",
        "for position, payload in attributes[:0]:",
        "test_keys.py::test_a_key_is_the_hash_of_the_documented_encoding",
    ),
    (
        "a key forgets the media digest",
        "core/prompt.py",
        "+ encode_text(span.digest)",
        '+ encode_text("")',
        "test_keys.py::test_a_key_is_the_hash_of_the_documented_encoding",
    ),
    (
        "token types are dropped",
        "core/prompt.py",
        "np.flatnonzero(np.diff(types, prepend=np.int32(0)))",
        "np.flatnonzero(np.diff(types, prepend=np.int32(0)))[:0]",
        "test_prompt.py::test_attributes_differ_just_where_what_they_stand_for_differs",
    ),
    (
        "a shift of one axis is dropped",
        "core/prompt.py",
        "(steps != 0).any(axis=0)",
        "(steps != 0).all(axis=0)",
        "test_prompt.py::test_attributes_differ_just_where_what_they_stand_for_differs",
    ),
    (
        "media without a digest is matched",
        "core/prompt.py",
        "bare[0] if bare else sys.maxsize",
        "sys.maxsize",
        "test_field_correctness.py::test_field_26_media_without_a_digest_is_never_retained",
    ),
    (
        "longer attributes are no difference",
        "core/radix.py",
        "if len(mine) == len(theirs):",
        "if True:",
        "test_faults.py::test_identity_what_tokens_carry_counts",
    ),
    (
        "a prompt is resumed at its end without logits",
        "core/lookup.py",
        "end = prompt.length if config.end_logits else prompt.length - 1",
        "end = prompt.length",
        "test_cuts.py::test_without_logits_of_the_end_one_token_is_left_to_compute",
    ),
    (
        "what expired is offered",
        "core/lookup.py",
        "or checkpoint.expires > self.now",
        "or True",
        "test_expiry.py::test_what_expired_is_not_offered_though_it_is_still_there",
    ),
    (
        "a hit below the minimum is taken",
        "core/explain.py",
        "elif resumable and resumable < config.minimum_tokens:",
        "elif False:",
        "test_search.py::test_an_explanation_reads_well",
    ),
    (
        "read=False is ignored",
        "core/lookup.py",
        "if not filter.read:",
        "if False:",
        "test_expiry.py::test_the_longest_life_asked_for_counts",
    ),
    (
        "a checkpoint off every cut is exact",
        "core/entry.py",
        " and (position % grid == 0 or theirs[-1:] == (position,))",
        "",
        "test_expiry.py::test_plain_attention_resumes_from_any_fork_that_has_not_expired",
    ),
    (
        "a checkpoint not made by the plan is exact",
        "core/entry.py",
        "        if self.cuts is None:\n            return False\n",
        "",
        "test_lease.py::test_backing_over_a_checkpoint_of_plain_attention",
    ),
    (
        "the partly filled page is forgotten",
        "core/entry.py",
        "return whole if self.tail < 0 else np.append(whole, np.int32(self.tail))",
        "return whole",
        "test_lease.py::test_backing_over_a_checkpoint_gives_its_image_back",
    ),
    (
        "what is resumed is not protected",
        "core/admission.py",
        "state.ref_lease(source, demand.source)",
        "state.ledger.ref_lease(demand.source)",
        "test_lease.py::test_it_says_what_it_reuses",
    ),
    (
        "the partly filled page is shared by two writers",
        "core/admission.py",
        "return [CopyPage(last, int(pages[whole]))] if rest else [], False",
        "return [], False",
        "test_lease.py::test_it_says_what_it_reuses",
    ),
    (
        "a claim goes on in a page that another reads",
        "core/admission.py",
        "alone = not rest or state.ledger.lease_refs[last] == 1",
        "alone = True",
        "test_claims.py::test_a_claim_does_not_write_a_page_that_its_publisher_still_writes",
    ),
    (
        "a hit that does not fit is no cold start",
        "core/admission.py",
        "if demand.pages > demand.freeable and lookup.checkpoint is not None:",
        "if False:",
        "test_faults.py::test_accounting_a_hit_given_up_for_want_of_room_is_not_reported_as_reused",
    ),
    (
        "state moves to another lane",
        "core/admission.py",
        "return home if home in free and wanted in (None, home) else None",
        "return free[0] if free else None",
        "test_lanes.py::test_where_state_cannot_move_a_busy_home_lane_is_waited_for",
    ),
    (
        "no room is taken for the answer",
        "core/admission.py",
        "+ options.reserve_tokens\n",
        "\n",
        "test_lease.py::test_backing_over_a_checkpoint_gives_its_image_back",
    ),
    (
        "a lease writes past its reserve",
        "core/progress.py",
        "if end > self.reserved:",
        "if end > self.reserved + 1:",
        "test_lease.py::test_what_advance_refuses",
    ),
    (
        "drafts taken back stay in the sequence",
        "core/lease.py",
        "del self._generated[4 * max(position - prompt_tokens, 0) :]",
        "pass",
        "test_lease.py::test_backing_over_a_checkpoint_gives_its_image_back",
    ),
    (
        "checkpoints past a truncation stay",
        "core/lease.py",
        "while self.taken and self.taken[-1].position > position:",
        "while False:",
        "test_lease.py::test_backing_over_a_checkpoint_gives_its_image_back",
    ),
    (
        "retain=False retains",
        "core/lease.py",
        "if self.doubt is not None or not self.options.retain:",
        "if self.doubt is not None:",
        "test_lease.py::test_what_expires_or_is_quarantined_is_told",
    ),
    (
        "a source in doubt is offered again",
        "core/lease.py",
        "            state.quarantine(self.source)\n            for checkpoint",
        "            for checkpoint",
        "test_guarantees.py::test_g5_a_position_that_is_not_the_pools_is_quarantined",
    ),
    (
        "what was published in doubt stays",
        "core/lease.py",
        "for checkpoint in self.taken[: self.published]:",
        "for checkpoint in ():",
        "test_guarantees.py::test_g5_a_position_that_is_not_the_pools_is_quarantined",
    ),
    (
        "a second image is taken at one position",
        "core/lease.py",
        "if self._has_checkpoint(position):",
        "if False:",
        "test_lease.py::test_events_follow_an_entry",
    ),
    (
        "a checkpoint past media without a digest",
        "core/lease.py",
        "position > self.prompt.shareable or ",
        "",
        "test_field_correctness.py::test_field_26_media_without_a_digest_is_never_retained",
    ),
    (
        "the essential image is spent on another",
        "core/lease.py",
        "if len(self.spare_images) <= self._essential_ahead():",
        "if not self.spare_images:",
        "test_guarantees.py::test_g3_the_prompt_end_is_never_the_capture_skipped",
    ),
    (
        "a lease's end leaves the source's pages leased",
        "core/lease.py",
        "        self._state.ledger.unref_lease(self.borrowed)\n",
        "",
        "test_lease.py::test_it_says_what_it_reuses",
    ),
    (
        "a key of two entries names the first",
        "core/pool.py",
        "return entries[0] if len(entries) == 1 else None",
        "return entries[0] if entries else None",
        "test_guarantees.py::test_g10_with_a_constant_for_a_hash_every_answer_is_right",
    ),
    (
        "evict removes what is pinned",
        "core/pool.py",
        "if state.catalog.protects(entry):\n                return False",
        "if False:\n                return False",
        "test_guarantees.py::test_g4_what_is_being_resumed_is_not_evicted",
    ),
    (
        "min_chunk is ignored",
        "core/planner.py",
        "if position > last and position - last >= min_chunk:",
        "if position > last:",
        "test_search.py::test_a_boundary_too_near_the_cut_before_it_is_no_cut",
    ),
    (
        "a superseded point forgets that it no longer is",
        "core/catalog.py",
        "            checkpoint.superseded = False\n",
        "",
        "test_lease.py::test_it_says_what_it_reuses",
    ),
    (
        "one ghost more is remembered",
        "core/ghosts.py",
        "if len(self.found) > self._capacity:",
        "if len(self.found) > self._capacity + 1:",
        "test_ghosts.py::test_a_ghost_that_is_forgotten_leaves_nothing_behind",
    ),
    (
        "LRU goes by creation",
        "core/policy/classical.py",
        "return (entry.tip.tick,)",
        "return (entry.created,)",
        "test_policies.py::test_a_use_that_ends_in_another_entry_is_told_to_the_policy",
    ),
)
EDITS = tuple(
    Edit(name=name, file=file, right=right, wrong=wrong, test=f"tests/core/{test}")
    for name, file, right, wrong, test in ROWS
)
