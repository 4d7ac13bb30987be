"""Which rank failed first, from what the ranks posted, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.strategies.processes.board import Post, on_host, runs


def failed(posts: Mapping[int, Post], *, machine: str) -> list[Post]:
    """The ranks that raised something, and those of this machine that are dead."""
    return [
        post
        for _, post in sorted(posts.items())
        if post.failure or (not post.done and post.host == machine and not runs(post.pid))
    ]


def sentence(post: Post, posts: Mapping[int, Post], *, world_size: int) -> str:
    """What happened to a rank that failed."""
    told = f"was killed by a signal; last seen in {post.where}"
    if post.failure:
        told = f"raised {post.failure}; it was in {post.failed_in}"
    return f"{post.name} of {world_size}{on_host(post, posts)} {told}."
