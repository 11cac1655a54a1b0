"""The directory that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.discovery.directory import MasterDirectory, StaticMasters
from kvstore.discovery.etcd_records import EtcdMasters

if TYPE_CHECKING:
    from configs.kvstore_masters import KVMastersConfig


def directory_of(config: KVMastersConfig, *, embedded: str = "") -> MasterDirectory:
    """Return where the masters are, for `followed`.

    Args:
        config: Of the masters.
        embedded: The address of the only master, where the configuration names none.

    Raises:
        ValueError: Nothing says where a master is.
    """
    if config.etcd.enabled:
        return EtcdMasters(config.etcd, config.num_shards)
    if config.addresses:
        return StaticMasters(config.addresses)
    if not embedded:
        raise ValueError("kvstore.masters: neither addresses nor etcd.endpoints are set")
    return StaticMasters([embedded])


@contextmanager
def followed(directory: MasterDirectory) -> Iterator[MasterDirectory]:
    """Keep a directory up to date meanwhile.

    It begins with what etcd says now: who reads at once would find that nobody is known to lead. If
    etcd cannot be reached within its `timeout_s`, it begins all the same.
    """
    if isinstance(directory, EtcdMasters):
        with directory:
            directory.wait()
            yield directory
    else:
        yield directory
