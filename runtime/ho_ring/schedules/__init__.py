"""The order in which a rank of a grid sends and receives: HO-Ring in two forms, and two native hops."""
