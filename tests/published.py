"""What a server has published: base KV and LR rows of every cached token, read from its pools.

A plugin that is written for the test and found through PYTHONPATH saves them when asked to.
Servers that published the same, token by token, give equal records.
"""

from __future__ import annotations

from pathlib import Path

import torch
from precache_sglang.launch.process import ServerProcess

# (namespace, salt, tokens up to and with this one) -> what is published for the last of them:
# "k" and "v" of all layers, and the rows of each slice key.
Published = dict[tuple[str, str, tuple[int, ...]], dict[str, torch.Tensor]]

_PLUGIN = """
import os
from pathlib import Path

import torch


def install():
    from precache_sglang.runtime import Runtime

    original = Runtime.state
    folder = Path(os.environ["PUBLISHED_FOLDER"])

    def state(self):
        if (folder / "wanted").exists():
            torch.save(published(self), folder / "published.new")
            (folder / "published.new").rename(folder / "published.pt")
            (folder / "wanted").unlink()
        return original(self)

    Runtime.state = state


def published(runtime):
    tree, pool = runtime.tree, runtime.lr_pool
    kv = tree.token_to_kv_pool_allocator.get_kvcache()
    keys, values = torch.stack(kv.k_buffer), torch.stack(kv.v_buffer)
    found = {}
    stack = [(tree.root_node, None, ())]
    while stack:
        node, namespace, before = stack.pop()
        for child in node.children.values():
            key = child.key
            tokens = before + tuple(key.token_ids)
            name = (str(key.extra_key), str(key.cache_salt))
            for index in range(len(key)):
                slot = int(child.value[index])
                record = {"k": keys[:, slot].clone(), "v": values[:, slot].clone()}
                for adapter, slots in child.slices.items():
                    record[adapter + " v"] = pool.v[:, int(slots[index])].clone()
                    if pool.k is not None:
                        record[adapter + " k"] = pool.k[:, int(slots[index])].clone()
                found[(*name, tokens[: len(before) + index + 1])] = record
            stack.append((child, name, tokens))
    return found
"""


def publish_plugin(folder: Path) -> dict[str, str]:
    """Write the plugin to `folder`; returns the environment of a server that uses it."""
    (folder / "published_plugin.py").write_text(_PLUGIN)
    info = folder / "published_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: published-plugin\nVersion: 1.0\n")
    entry = "[sglang.srt.plugins]\npublished = published_plugin:install\n"
    (info / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": str(folder), "PUBLISHED_FOLDER": str(folder)}


def published(server: ServerProcess, folder: Path) -> Published:
    """What `server` holds now; it must have been started with the plugin of `folder`."""
    (folder / "wanted").touch()
    server.state()
    found: Published = torch.load(folder / "published.pt")
    return found


def differences(a: Published, b: Published) -> list[str]:
    """What is not the same in two records; float32 sums differ by their order."""
    problems = [f"only in one: {key[0]} {len(key[2])} tokens" for key in a.keys() ^ b.keys()]
    for key in a.keys() & b.keys():
        mine, other = a[key], b[key]
        where = f"{key[0]} {key[1]} token {len(key[2])}"
        if mine.keys() != other.keys():
            problems.append(f"{where}: {sorted(mine)} against {sorted(other)}")
            continue
        for name, tensor in mine.items():
            if not torch.allclose(tensor, other[name], rtol=1e-3, atol=1e-4):
                worst = (tensor - other[name]).abs().max().item()
                problems.append(f"{where}: {name} differs by {worst:.2g}")
    return problems
