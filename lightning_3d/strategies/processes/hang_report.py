"""Who waits for whom, from what the ranks posted: one plain summary of a hang."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.strategies.processes.board import Post, on_host

# A watchdog posts twice a second, on a crowded machine less often.
SILENT_SECONDS = 4.0


def awaited(rank: int, posts: Mapping[int, Post]) -> list[int]:
    """The ranks without which this one cannot go on; empty where it does not wait, or nobody is behind it.

    A pipeline's action names the ranks that it needs. Else they are those that share a group with this rank and have
    begun fewer collectives in it.
    """
    own = posts[rank]
    if not own.waiting:
        return []
    behind = [other for other, post in sorted(posts.items()) if _is_behind(post, own)]
    return behind or [other for other in own.awaits if other in posts]


def _is_behind(post: Post, other: Post) -> bool:
    """Whether a rank has not come to a collective that the other has begun."""
    return any(post.sequence[group] < number for group, number in other.sequence.items() if group in post.sequence)


def silent(post: Post, *, now: float) -> bool:
    """Whether nothing has been heard of a rank for too long: its process is stopped, or cannot run."""
    return not post.done and now - post.time > SILENT_SECONDS


def causes(posts: Mapping[int, Post], *, now: float) -> list[int]:
    """The ranks that hold up the others: silent ones, else those that others wait for and that wait for nobody."""
    lost = [rank for rank, post in sorted(posts.items()) if silent(post, now=now)]
    if lost:
        return lost
    waited_for = {other for rank in posts for other in awaited(rank, posts)}
    free = [rank for rank in sorted(waited_for) if not awaited(rank, posts)]
    return free or [rank for rank, post in sorted(posts.items()) if not post.waiting and not post.done]


def cut_hosts(posts: Mapping[int, Post], *, now: float) -> list[str]:
    """The hosts that seem not to hear each other: all ranks wait, and in the end for those of other machines."""
    if any(silent(post, now=now) or not post.waiting or post.done for post in posts.values()):
        return []
    if len({post.host for post in posts.values()}) < 2:
        return []
    waits = {rank: [posts[other] for other in awaited(rank, posts)] for rank in posts}
    crossing = {rank for rank, post in posts.items() if any(other.host != post.host for other in waits[rank])}
    for post in posts.values():
        for other in waits[post.rank]:
            if other.host == post.host and waits[other.rank] and other.rank not in crossing:
                return []
            if _is_behind(post, other) and _is_behind(other, post):
                # They have taken different ways.
                return []
    return sorted({post.hostname for post in posts.values()})


def headline(posts: Mapping[int, Post], *, world_size: int, timeout_seconds: float, now: float) -> str:
    """One line: what happened, and whose fault it is."""
    absent = [f"rank {rank}" for rank in range(world_size) if rank not in posts]
    if absent and all(post.where == "setup" for post in posts.values()):
        return f"no progress for {timeout_seconds:g} s: {', '.join(absent)} has not come"
    cut = cut_hosts(posts, now=now)
    if cut:
        return (
            f"no progress for {timeout_seconds:g} s: what {' and '.join(cut)} send each other does not arrive: "
            "is the network between them cut?"
        )
    found = causes(posts, now=now)
    if not found:
        return f"all ranks wait for each other for {timeout_seconds:g} s: they have taken different ways"
    told = []
    for rank in found:
        post = posts[rank]
        name = f"{post.name}{on_host(post, posts)}"
        if silent(post, now=now):
            told.append(f"{name} has not been heard of for {now - post.time:.0f} s, since {post.where}")
        else:
            told.append(f"{name} is in {post.where}{_at(post)}")
    return f"no progress for {timeout_seconds:g} s: {'; '.join(told)}"


def summarise(
    posts: Mapping[int, Post], *, world_size: int, timeout_seconds: float, now: float, details: str = ""
) -> str:
    """The whole summary: the headline, a line for each rank, and what to do.

    Args:
        details: where stacks are.
    """
    first = headline(posts, world_size=world_size, timeout_seconds=timeout_seconds, now=now)
    lines = [first if first.endswith("?") else f"{first}."]
    for rank in range(world_size):
        post = posts.get(rank)
        if post is None:
            lines.append(f"  rank {rank} has said nothing here; it may be on another machine.")
            continue
        others = awaited(rank, posts)
        if silent(post, now=now):
            state = "has not been heard of: its process is stopped, or something keeps Python from running"
        elif others:
            state = f"waits for {', '.join(f'rank {other}' for other in others)}"
        elif post.waiting:
            state = "waits, but nobody is behind it"
        elif post.done:
            state = "has finished"
        else:
            state = "does not wait for others: it computes, or waits for something else"
        still = post.still_seconds + max(0.0, now - post.time)
        lines.append(f"  {post.name}{on_host(post, posts)}: {state}; {post.where} for {still:.0f} s{_at(post)}")
    if details:
        lines.append(f"  stacks of all ranks: {details}")
    lines.append("  If this was no hang but slow work, set a longer timeout_seconds.")
    return "\n".join(lines)


def _at(post: Post) -> str:
    return f", at {post.place}" if post.place else ""
