// What this browser tells of the device that it runs on. It stays in the page, and in the report that is downloaded.

/** @returns {Promise<object>} what the browser does not tell is null */
export async function describeBrowser() {
  const told = navigator.userAgentData;
  const more = await moreOf(told);
  const adapter = await findAdapter();
  const browser = browserName(told);
  const system = told?.platform || navigator.platform || null;
  return {
    system,
    release: more.platformVersion || null,
    machine: more.architecture ? [more.architecture, more.bitness].filter(Boolean).join("-") : null,
    model: more.model || null,
    browser,
    user_agent: navigator.userAgent,
    cores: navigator.hardwareConcurrency ?? null,
    device_memory_gib: navigator.deviceMemory ?? null,
    gpu: adapter?.name ?? null,
    gpu_in_software: adapter?.software ?? null,
    power: await powerSource(),
    secure_context: isSecureContext,
    cross_origin_isolated: self.crossOriginIsolated === true,
  };
}

/** Why WebGPU cannot be used here; null: it can. */
export function whyNoWebGpu(facts) {
  if (facts.gpu !== null) return null;
  if (!facts.secure_context) return "browsers allow WebGPU on https:// and localhost only";
  return navigator.gpu ? "the browser offers no graphics adapter" : "this browser has no WebGPU";
}

/** Threads that can be had, and why not more: without isolation browsers share no memory between them. */
export function threadLimit(facts) {
  return facts.cross_origin_isolated ? Math.max(1, facts.cores ?? 1) : 1;
}

async function moreOf(told) {
  try {
    return (await told?.getHighEntropyValues(["architecture", "bitness", "model", "platformVersion"])) ?? {};
  } catch {
    return {};
  }
}

function browserName(told) {
  const brands = (told?.brands ?? []).filter(({ brand }) => !/not.*brand/i.test(brand));
  const brand = brands.find((one) => one.brand !== "Chromium") ?? brands[0];
  if (brand) return `${brand.brand} ${brand.version}`;
  const agent = navigator.userAgent;
  const found = /(Firefox|Edg|OPR|CriOS|FxiOS|Chrome)\/([\d.]+)/.exec(agent) ?? /Version\/([\d.]+).*Safari/.exec(agent);
  if (found === null) return "unknown browser";
  return found.length === 3 ? `${found[1]} ${found[2]}` : `Safari ${found[1]}`;
}

async function findAdapter() {
  try {
    const adapter = await navigator.gpu?.requestAdapter();
    if (!adapter) return null;
    const info = adapter.info ?? {};
    const words = [info.vendor, info.architecture, info.device, info.description].filter(Boolean);
    const software = info.isFallbackAdapter ?? adapter.isFallbackAdapter ?? null;
    return { name: [...new Set(words)].join(" ") || "not named by the browser", software };
  } catch {
    return null;
  }
}

async function powerSource() {
  try {
    const battery = await navigator.getBattery?.();
    if (!battery) return null;
    return battery.charging ? "mains" : `battery at ${Math.round(battery.level * 100)}%`;
  } catch {
    return null;
  }
}
