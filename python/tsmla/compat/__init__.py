"""Functions of other libraries ("faces"), with their names, defaults, units and layouts, computed by tsmla's operators.

    from tsmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata

Each library has a module: `tokenspeed_mla`, `flash_mla`, `flashinfer`. tsmla itself imports none of them, and never
installs a top-level module of such a name. What a face cannot do is refused with the argument's name;
docs/start/compat.md says, for each, what is the same, what is refused and what is better.
"""
