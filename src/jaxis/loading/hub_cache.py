"""The models in huggingface_hub's cache: their list, and their removal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jaxis.errors import CheckpointError


@dataclass(frozen=True)
class CachedModel:
    """One revision of a repository in the cache.

    Attributes:
      name: Hub id.
      refs: Branches and tags that point to it, as of the last download.
      nbytes: Size of its files; revisions of a repository may share some.
      path: Folder of the files.
      last_used: Time at which one of the repository's files was last read.
    """

    name: str
    commit: str
    refs: tuple[str, ...]
    nbytes: int
    num_files: int
    path: Path
    last_used: datetime


def cached_models() -> list[CachedModel]:
    """Returns the models in the cache, by name, the newest revision first. Raises CheckpointError on failure."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        info = scan_cache_dir()
    except CacheNotFound:
        return []  # nothing has been downloaded yet
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the cache of the Hub cannot be read: {error}") from None
    return [
        CachedModel(
            repo.repo_id,
            revision.commit_hash,
            tuple(sorted(revision.refs)),
            revision.size_on_disk,
            len(revision.files),
            revision.snapshot_path,
            datetime.fromtimestamp(repo.last_accessed, UTC),
        )
        for repo in sorted(info.repos, key=lambda repo: repo.repo_id.lower())
        if repo.repo_type == "model"
        for revision in sorted(repo.revisions, key=lambda revision: -revision.last_modified)
    ]


def find_cached(name: str, revision: str | None) -> list[CachedModel]:
    """Returns the cached revisions of a repository: a branch, a tag, the beginning of a commit, or None for all.

    Raises CheckpointError if there is none, or several commits begin like this.
    """
    models = [model for model in cached_models() if model.name == name]
    if not models:
        raise CheckpointError(f"{name} is not in the cache: `jaxis list` shows what is")
    if revision is None:
        return models
    found = [model for model in models if revision in model.refs]
    found = found or [model for model in models if len(revision) >= 4 and model.commit.startswith(revision)]
    if len(found) != 1:
        known = ", ".join("/".join((*model.refs, model.commit[:12])) for model in models)
        raise CheckpointError(f"{name} has {len(found) or 'no'} revisions {revision!r} in the cache: it has {known}")
    return found


def remove_cached(models: Sequence[CachedModel]) -> int:
    """Deletes revisions of one repository, and every file that no other one needs; returns the freed bytes.

    Raises CheckpointError if a file could not be deleted.
    """
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir()
    # A copy of a repository has the same commits, by which the library would delete either.
    repos = frozenset(repo for repo in info.repos if repo.repo_type == "model" and repo.repo_id == models[0].name)
    strategy = dataclasses.replace(info, repos=repos).delete_revisions(*[model.commit for model in models])
    freed = strategy.expected_freed_size
    strategy.execute()
    left = [str(model.path) for model in models if model.path.exists()]  # the library only logs what it cannot delete
    if left:
        raise CheckpointError(f"{left[0]} could not be deleted: check its permissions")
    return freed
