"""What every room uses: errors, files, names in configs, units, memory and processor cores, ranks, plugins."""
