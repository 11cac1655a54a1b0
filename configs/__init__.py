"""Configuration of moe-runtime: schema, presets and loader. Imports nothing of ours."""
