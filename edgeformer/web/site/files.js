// Downloads. Every file comes with a checksum, which the browser itself compares before it hands the bytes over.

/**
 * @param {{url: string, integrity: string, size_bytes: number}} file of site.json
 * @param {string} base address of the page's folder
 * @returns {Promise<{bytes: Uint8Array, ms: number, cached: boolean | null}>} `cached`: null where it is not known
 */
export async function download(file, base) {
  const url = new URL(file.url, base).href;
  const began = performance.now();
  let bytes;
  try {
    const response = await fetch(url, { integrity: file.integrity, credentials: "omit", referrerPolicy: "no-referrer" });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    bytes = new Uint8Array(await response.arrayBuffer());
  } catch (error) {
    // The browser does not say which of these it was; its console does.
    const why = error instanceof TypeError ? "it is missing, or its checksum differs; write the page again" : error.message;
    throw new Error(`${file.url} could not be downloaded: ${why}`);
  }
  return { bytes, ms: performance.now() - began, cached: cameFromCache(url) };
}

export async function downloadJson(file, base) {
  return JSON.parse(new TextDecoder().decode((await download(file, base)).bytes));
}

/** A module's bytes, checked by `download`, as an address that `import` takes. */
export function asModule(bytes) {
  return URL.createObjectURL(new Blob([bytes], { type: "text/javascript" }));
}

function cameFromCache(url) {
  const entry = performance.getEntriesByName(url, "resource").at(-1);
  // Other origins keep the sizes to themselves: then all of them are 0.
  if (entry === undefined || !entry.encodedBodySize) return null;
  return entry.transferSize === 0;
}
