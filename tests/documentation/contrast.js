// The texts of a page whose contrast with their background is below a ratio: [contrast, colours, text].
(least) => {
  // What CSS calls a colour, as numbers: whatever its notation, the browser can paint it.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const parse = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(colour, [r, g, b, a / 255]);
    }
    return known.get(colour);
  };
  const over = (top, below) => {
    const alpha = top[3];
    return [0, 1, 2].map((i) => top[i] * alpha + below[i] * (1 - alpha)).concat(1);
  };
  const backgroundOf = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement) {
      layers.push(parse(getComputedStyle(each).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((value) => {
      const part = value / 255;
      return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Map();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const background = backgroundOf(element);
    const ink = over(parse(getComputedStyle(element).color), background);
    const [bright, dim] = [luminance(ink), luminance(background)].sort((a, b) => b - a);
    const contrast = (bright + 0.05) / (dim + 0.05);
    const colours = `${getComputedStyle(element).color} on ${background.slice(0, 3).map(Math.round)}`;
    if (contrast < least) found.set(colours, [contrast.toFixed(2), colours, element.className, text.slice(0, 40)]);
  }
  return [...found.values()];
}
