"""Load prompts to trace: named data sets of the hub, the demo's held-out items, local files."""

from moeinf.runtime.jobs.datasets.items import BadDataset, Item, NoSuchDataset, Wanted
from moeinf.runtime.jobs.datasets.table import dataset_names, load_items

__all__ = ["BadDataset", "Item", "NoSuchDataset", "Wanted", "dataset_names", "load_items"]
