"""Bytes to tables: reads every kind of trace, log and dump, salvaging and counting what is broken."""
