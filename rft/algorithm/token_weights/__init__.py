"""How much a token counts in the loss: weights, rejections and the mask of gradients."""
