"""Composing a config in a tenth of the time: what Hydra reads, merges and parses is kept for the session."""

import copy
import functools
import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import omegaconf.base
import pytest
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf, flag_override
from omegaconf.base import Box, Node


@dataclass
class Piece(ResultDefault):
    """What an entry of a defaults list has below one key of the config.

    Attributes:
        config: pickled; it has no other key.
    """

    config: bytes = b""


def read_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A yaml file of Hydra, or of the folder, is read once, and what stands below a key is merged once from such files.

    Hydra moves the nodes of what it reads into the config, so every config gets a copy. A copy by pickle takes an
    eighth of the time of `copy.deepcopy`.
    """

    def stays(scheme: str, path: str) -> bool:
        return scheme in ("pkg", "structured") or (scheme, path) == ("file", str(folder))

    load, place = ConfigRepository.load_config, ConfigLoaderImpl._load_single_config
    merge, create_map = ConfigLoaderImpl._compose_config_from_defaults_list, defaults_list._create_interpolation_map
    parse = OverridesParser.parse_rule
    known, loaded, divided, merged, parsed = {}, {}, {}, {}, {}

    def has(source, config_path):
        key = source.scheme(), source.path, config_path
        if not stays(*key[:2]):
            return source.is_config(config_path)
        if key not in known:
            known[key] = source.is_config(config_path)
        return known[key]

    def load_config(self, config_path):
        source = next((source for source in self.sources if has(source, config_path)), None)
        if source is None or not stays(source.scheme(), source.path):
            return load(self, config_path)
        key = source.provider, source.path, config_path
        if key not in loaded:
            loaded[key] = load(self, config_path)
        return copy.copy(loaded[key])  # of which Hydra moves nothing

    def place_config(self, default, repo):
        if isinstance(default, Piece):
            return ConfigResult("", "", pickle.loads(default.config), {})
        return place(self, default, repo)

    def divide(self, default, repo):
        """The name of an entry, None where its file may change, and its pieces by their keys."""
        found = repo.load_config(default.config_path)
        name = found.provider, found.path, default.config_path, default.package, default.primary
        if name not in divided:
            config = place(self, default, repo).config
            parts = {key: pickle.dumps(OmegaConf.masked_copy(config, key)) for key in config}
            pieces = {key: Piece(default.config_path, config=part) for key, part in parts.items()}
            if not stays(*found.path.split("://", 1)):
                return None, pieces
            divided[name] = pieces
        return name, divided[name]

    def merge_by_key(self, defaults, repo):
        """Most configs differ below few keys."""
        entries = defaultdict(list)
        for default in defaults:
            name, pieces = divide(self, default, repo)
            for key, piece in pieces.items():
                entries[key].append((name, piece))
        config = OmegaConf.create()
        with flag_override(config, "no_deepcopy_set_nodes", True):
            for key, parts in entries.items():
                names = key, *(name for name, _ in parts)
                if names not in merged or None in names:
                    merged[names] = pickle.dumps(merge(self, [piece for _, piece in parts], repo))
                config[key] = pickle.loads(merged[names])._get_node(key)
        return config

    def create_needed_map(overrides, defaults, self_added):
        """The names that interpolations of a defaults list may read; nothing where it has no interpolation."""
        needed = any(default.is_interpolation() for default in defaults)
        return create_map(overrides, defaults, self_added) if needed else None

    def parse_rule(self, text, rule):
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(self, text, rule)
        return copy.copy(parsed[text, rule])  # of which Hydra sets a field

    def copy_entries(entries):
        """Hydra sets fields of the entries of a defaults list, and changes no value of a field."""
        return None if entries is None else [copy.copy(entry) for entry in entries]

    def copy_repository(self, delegate):
        """Hydra replaces the list of the sources, and changes nothing in it."""
        self.delegate, self.cache = copy.copy(delegate), {}

    patch.setattr(ConfigRepository, "load_config", load_config)
    patch.setattr(CachingConfigRepository, "__init__", copy_repository)
    patch.setattr(ConfigLoaderImpl, "_load_single_config", place_config)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_by_key)
    patch.setattr(defaults_list, "_create_interpolation_map", create_needed_map)
    patch.setattr(defaults_list, "copy", SimpleNamespace(copy=copy.copy, deepcopy=copy_entries))
    patch.setattr(OverridesParser, "parse_rule", parse_rule)
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
