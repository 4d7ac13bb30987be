"""Which rank failed first, from what the ranks posted, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.strategies.processes.board import Post, on_host, runs
from lightning_3d.strategies.processes.hang_report import silent

# Words of Gloo, c10d and NCCL for a peer that is gone, or whose connection is.
LOST = (
    "gloo/transport",
    "DistNetworkError",
    "DistStoreError",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
)


@dataclass(frozen=True)
class Cause:
    """Why a job fails.

    Args:
        text: one line.
        machine: where that happened.
    """

    text: str
    machine: str


def lost_connection(failure: str) -> bool:
    """Whether a rank failed because another one did, or because it cannot reach that.

    >>> lost_connection("RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:7378.")
    True
    """
    return any(word in failure for word in LOST)


def failed(posts: Mapping[int, Post], *, machine: str) -> list[Post]:
    """Those of this machine that are dead, for others fail of that, and the ranks that raised something, in order."""
    found = [
        post
        for _, post in sorted(posts.items())
        if post.failure or (not post.done and post.host == machine and not runs(post.pid))
    ]
    return sorted(found, key=lambda post: post.failed_at)


def first_cause(
    posts: Mapping[int, Post], *, world_size: int, machine: str, known_since: float, now: float
) -> Cause | None:
    """The failure that is no lost connection; else ranks of other machines that are silent since.

    Args:
        machine: this one.
        known_since: when a failure was seen first.

    Returns:
        None while ranks of other machines may still say what happened there, or fall silent.
    """
    found = failed(posts, machine=machine)
    for post in found:
        if not lost_connection(post.failure):
            return Cause(_sentence(post, posts, world_size=world_size), post.host)
    away = [post for _, post in sorted(posts.items()) if post.host != machine and not (post.done or post.failure)]
    gone = [post for post in away if silent(post, now=now)]
    if gone:
        return Cause(_gone(gone, world_size=world_size), gone[0].host)
    if found and all(post.time > known_since for post in away):
        return Cause(_sentence(found[0], posts, world_size=world_size), found[0].host)
    return None


def _sentence(post: Post, posts: Mapping[int, Post], *, world_size: int) -> str:
    told = f"was killed by a signal or os._exit; last seen in {post.where}"
    if post.failure:
        told = f"raised {post.failure}; it was in {post.failed_in}"
    return f"{post.name} of {world_size}{on_host(post, posts)} {told}."


def _gone(posts: list[Post], *, world_size: int) -> str:
    where = f"not been heard of since {posts[0].where}; connections to"
    if len(posts) == 1:
        return f"{posts[0].name} of {world_size} on {posts[0].hostname} has {where} it broke."
    hosts: dict[str, list[str]] = {}
    for post in posts:
        hosts.setdefault(post.hostname, []).append(str(post.rank))
    names = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} of {world_size} on {host}"
        for host, ranks in hosts.items()
    ]
    return f"{' and '.join(names)} have {where} them broke."
