"""Measurements of moeinf against floors, ceilings and peers. Does not know how results are used."""
