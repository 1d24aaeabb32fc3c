"""Where rankprobe meets the world: loaders, trainers and continuous integration. Installed as `rankprobe.integrations`.

The core never imports this package; what is here may import anything it needs, lazily.
"""
