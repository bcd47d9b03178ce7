"""Tables and pictures that commands show."""
