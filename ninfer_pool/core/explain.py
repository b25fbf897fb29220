"""Explaining a lookup: why it is as deep as it is. Nothing here changes anything (G7)."""

from __future__ import annotations

from collections.abc import Iterator

from ninfer_pool.core import radix
from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.entry import Node
from ninfer_pool.core.ghosts import Ghost
from ninfer_pool.core.lookup import Lookup, LookupFilter, deepest_resume
from ninfer_pool.core.prompt import Prompt, payload_fields
from ninfer_pool.core.radix import Step
from ninfer_pool.core.results import Explanation
from ninfer_pool.core.state import PoolState

FEW_TOKENS = 8
"""Tokens that no checkpoint is advised for: all prompts of a template begin alike."""


def explain(state: PoolState, lookup: Lookup, filter: LookupFilter) -> Explanation:
    """Return why a prompt hits as deep as ``lookup`` and no deeper. Never across a salt.

    O(matched bytes), times the namespaces of the same salt where nothing matched.
    """
    config, prompt = state.config, lookup.prompt
    limit = deepest_resume(config, prompt)
    matched, resumable = min(lookup.matched, limit), lookup.position
    ghost = None
    if max(matched, resumable) < limit and state.ghosts.found:
        above = max(matched, resumable)
        ghost = state.ghosts.deepest(
            prompt.namespace, prompt.buffer, prompt.attributes, above=above, limit=limit
        )
    if not filter.read:
        reason = "opted_out"
    elif resumable and resumable < config.minimum_tokens:
        reason, resumable = "below_minimum", 0
    elif ghost is not None:
        reason = "quarantined" if ghost.cause == "quarantined" else "evicted"
        matched = ghost.position
    elif resumable >= matched and resumable:
        reason = "hit"
    elif (field := _other_identity(state, lookup, resumable)) is not None:
        reason = f"identity:{field}"
    elif matched == 0:
        reason = "no_entry"
    elif matched - resumable >= prompt.length - matched:
        reason = "no_checkpoint_before"
    else:
        reason = "diverged"
    diverged = _diverged_at(lookup)
    evicted = ghost if ghost is not None and ghost.cause == reason == "evicted" else None
    return Explanation(
        reason=reason,
        tokens=prompt.length,
        matched=max(matched, resumable),
        resumable=resumable,
        lost=max(matched, resumable) - resumable,
        diverged_at=diverged,
        kind=lookup.kind if resumable else None,
        exact=lookup.exact if resumable else True,
        tier=lookup.tier if resumable else None,
        evicted_tick=evicted.tick if evicted else None,
        used_tick=evicted.used if evicted else None,
        helps=()
        if reason == "hit"
        else tuple(_helps(config, reason, matched, resumable, diverged, ghost)),
    )


def _diverged_at(lookup: Lookup) -> int | None:
    """Return where the prompt parts from a retained sequence with another token there."""
    if not lookup.steps:
        return None
    node, upto = lookup.steps[-1]
    further = upto < node.end or bool(node.children and upto in node.children)
    return upto if further and upto < lookup.prompt.length else None


def _other_identity(state: PoolState, lookup: Lookup, resumable: int) -> str | None:
    """Return the identity field whose difference costs a deeper match, under the same salt."""
    prompt = lookup.prompt
    if lookup.steps:
        node, upto = lookup.steps[-1]
        attribute = _differing_attribute(node, upto, prompt)
        if attribute is not None:
            return attribute
    for namespace, root in state.catalog.roots.items():
        if namespace.salt == prompt.namespace.salt and namespace != prompt.namespace:
            steps = radix.walk(root, prompt.buffer, prompt.attributes)
            if _depth(state.config, steps, prompt) > max(resumable, lookup.matched):
                return prompt.namespace.first_difference(namespace)
    return None


def _depth(config: PoolConfig, steps: list[Step], prompt: Prompt) -> int:
    """Return how deep a path could be resumed if its namespace were the prompt's."""
    limit = deepest_resume(config, prompt)
    if config.image_bytes:
        checkpoint = next(radix.checkpoints_upto(steps, limit), None)
        return checkpoint.position if checkpoint is not None else 0
    position = min(limit, steps[-1][1]) if steps else 0
    return position if any(True for _ in radix.covering(steps, position)) else 0


_FIELDS = dict(zip(b"MQPT", ("media", "positions", "positions", "token_types"), strict=True))


def _differing_attribute(node: Node, upto: int, prompt: Prompt) -> str | None:
    """Return the attribute that differs at ``upto`` where the tokens agree, else None."""
    mine = dict(prompt.attributes).get(upto, b"")
    offset = 4 * (upto - node.start)
    token = prompt.buffer[4 * upto : 4 * upto + 4].tobytes()
    others = []
    if upto < node.end and node.tokens[offset : offset + 4] == token:
        others.append(dict(node.attributes).get(upto, b""))
    others += [key[4:] for key in (node.children or {}).get(upto, ()) if key[:4] == token]
    if not others:
        return None
    one, two = payload_fields(mine), payload_fields(others[0])
    return next(_FIELDS[tag] for tag in b"MQPT" if one.get(tag) != two.get(tag))


def _helps(
    config: PoolConfig,
    reason: str,
    matched: int,
    resumable: int,
    diverged: int | None,
    ghost: Ghost | None,
) -> Iterator[str]:
    if reason in ("diverged", "no_checkpoint_before") and matched - resumable > FEW_TOKENS:
        yield f"a checkpoint at {matched} would spare {matched - resumable} tokens more"
    if diverged:  # at 0 it is another prompt altogether
        yield f"the same token at {diverged} as before (something in the prompt changes there)"
    if ghost is not None and ghost.cause == "evicted":
        pages = -(-ghost.position // config.page_tokens) + config.image_pages
        yield f"{pages * config.page_bytes} bytes more, so that {ghost.position} tokens stay"
    if reason.startswith("identity:"):
        yield f"the same {reason.partition(':')[2]} as the retained entry's"
    if ghost is not None and ghost.cause == "expired":
        yield "a longer ttl_seconds"
    if reason == "below_minimum":
        yield f"minimum_tokens below {config.minimum_tokens}"
