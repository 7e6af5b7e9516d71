"""Composing a config in a third of the time: what Hydra reads of a package is read once a session."""

import copy
import functools
import pickle
from dataclasses import dataclass
from pathlib import Path

import omegaconf.base
import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.base import Box, Node


@dataclass
class Merged(ResultDefault):
    """Entries of a defaults list, merged.

    Attributes:
        config: pickled.
    """

    config: bytes = b""


def files_of(repository: ConfigRepository) -> list[ConfigSource]:
    """The sources of a repository that read files."""
    return [source for source in repository.get_sources() if source.scheme() != "structured"]


def read_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A yaml file of Hydra, or of the folder, is read once, and once put into the place that its package names.

    Hydra moves the nodes of what it reads into the config, so every config gets a copy. A copy by pickle takes an
    eighth of the time of `copy.deepcopy`.
    """

    def stays(scheme: str, path: str) -> bool:
        return scheme == "pkg" or (scheme, path) == ("file", str(folder))

    def source_of(repository: ConfigRepository, config_path: str) -> ConfigSource | None:
        return next((source for source in repository.sources if source.is_config(config_path)), None)

    load, load_placed = ConfigRepository.load_config, ConfigLoaderImpl._load_single_config
    merge, create_map = ConfigLoaderImpl._compose_config_from_defaults_list, defaults_list._create_interpolation_map
    loaded, placed, merged = {}, {}, {}

    def load_config(self, config_path):
        source = source_of(self, config_path)
        if source is None or not stays(source.scheme(), source.path):
            return load(self, config_path)
        key = source.provider, source.path, config_path
        if key not in loaded:
            loaded[key] = load(self, config_path)
        return copy.copy(loaded[key])  # Hydra reads its config and its defaults, and moves nothing of it

    def load_placed_config(self, default, repo):
        if isinstance(default, Merged):
            return ConfigResult("", "", pickle.loads(default.config), {})
        found = repo.load_config(default.config_path)
        if found is None or not stays(*found.path.split("://", 1)):
            return load_placed(self, default, repo)
        key = found.provider, found.path, default.config_path, default.package, default.primary
        if key not in placed:
            placed[key] = pickle.dumps(load_placed(self, default, repo))
        return pickle.loads(placed[key])

    def merge_after_the_same(self, defaults, repo):
        """What stands before the group `algorithm` is merged once: most configs differ in what follows."""
        count = next((n for n, default in enumerate(defaults) if (default.package or "").startswith("algorithm")), 0)
        key = tuple((default.config_path, default.package, default.primary) for default in defaults[:count])
        if not count or not all(stays(source.scheme(), source.path) for source in files_of(repo)):
            return merge(self, defaults, repo)
        if key not in merged:
            merged[key] = Merged(config=pickle.dumps(merge(self, defaults[:count], repo)))
        return merge(self, [merged[key], *defaults[count:]], repo)

    def create_needed_map(overrides, defaults, self_added):
        """The names that interpolations of a defaults list may read; none of them where it has no interpolation."""
        needed = any(default.is_interpolation() for default in defaults)
        return create_map(overrides, defaults, self_added) if needed else OmegaConf.create()

    patch.setattr(ConfigRepository, "load_config", load_config)
    patch.setattr(ConfigLoaderImpl, "_load_single_config", load_placed_config)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_after_the_same)
    patch.setattr(defaults_list, "_create_interpolation_map", create_needed_map)
    patch.setattr(omegaconf.base, "parse", functools.cache(omegaconf.base.parse))
    patch.setattr(Box, "_re_parent", set_parents)


def set_parents(self: Box) -> None:
    """What `Box._re_parent` does, without its imports and checks, which take most of its time."""
    content = self.__dict__["_content"]
    if isinstance(content, Node):
        content._set_parent(self)
        if isinstance(content, Box):
            set_parents(content)
    elif isinstance(content, dict | list):
        for node in content.values() if isinstance(content, dict) else content:
            fields = node.__dict__
            fields["_parent"] = self
            if fields["_flags_cache"] is not None:
                node._invalidate_flags_cache()
            if isinstance(node, Box):
                set_parents(node)
