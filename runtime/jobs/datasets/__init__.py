"""Prompts to trace: named data sets of the hub, the demo's held-out items, and local files.

Does not know models, templates or what is recorded.
"""

from moeinf.runtime.jobs.datasets.items import BadDataset, Item, NoSuchDataset, Wanted
from moeinf.runtime.jobs.datasets.table import dataset_names, load_items

__all__ = ["BadDataset", "Item", "NoSuchDataset", "Wanted", "dataset_names", "load_items"]
