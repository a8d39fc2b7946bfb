"""zg -- the generator's passes; zgen calls them through main."""
