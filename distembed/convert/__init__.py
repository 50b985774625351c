"""Tables between stock TorchRec models and compositional ones: fitted one way, written out the other."""
