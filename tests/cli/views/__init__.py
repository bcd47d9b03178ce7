"""Tests of the tables and pictures that commands show."""
