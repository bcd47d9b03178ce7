"""The bytes of experts: layout, shards, quantised tiles, files read past the page cache."""
