"""SAM, SAM-HQ or SAM 2: the mask of the object at a point of an image.

python examples/segmentation.py --image street.jpg --x 500 --y 375
"""

import numpy
import torch
from common import command_line, device_and_dtype
from PIL import Image
from transformers import AutoModelForMaskGeneration, AutoProcessor

import sparge

args = command_line(__doc__, model="facebook/sam-vit-huge", image="image.jpg", x=500, y=375, output="mask.png")
device, dtype = device_and_dtype()
processor = AutoProcessor.from_pretrained(args.model)
model = AutoModelForMaskGeneration.from_pretrained(args.model, dtype=dtype).to(device).eval()

# The global layers of the image encoder have 4096 tokens or more; window layers and the decoder have few.
# SAM adds a position bias to every score. On a GPU, reading the bias costs more than sparsity saves, so these calls
# run dense. SAM 2 has no bias.
sparge.enable(model, args.policy or sparge.Policy(topk=args.topk))

image = Image.open(args.image).convert("RGB")
inputs = processor(images=image, input_points=[[[[args.x, args.y]]]], return_tensors="pt").to(device)
sizes = [inputs.pop(name).cpu() for name in ("original_sizes", "reshaped_input_sizes") if name in inputs]
inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
with torch.inference_mode():
    outputs = model(**inputs)
masks = processor.post_process_masks(outputs.pred_masks.cpu(), *sizes)[0][0]  # several masks of one object
best = outputs.iou_scores[0, 0].argmax()
Image.fromarray(masks[best].numpy().astype(numpy.uint8) * 255).save(args.output)
print(sparge.stats())
